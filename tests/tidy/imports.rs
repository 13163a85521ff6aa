//! The imports of the files of `src/`: modules of lower levels only, and no file that leads back.
//!
//! A file depends on another where one of its paths (`crate::a::B`, `super::b::f`, `module::f` of an imported module)
//! ends at an item that the other defines or re-exports. A re-export is followed to the file that defines the item, on
//! which the re-exporting file depends too. A module's own items re-exported by its `mod.rs` are an index, no
//! dependency; `mod a;` and the import of a whole module are none by themselves.

use super::none;
use super::source::{File, code, files};
use regex::{Captures, Regex};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

/// Dependencies that close a cycle and stay: from, to, why. This list may only shrink.
#[rustfmt::skip]
const ALLOWED: &[(&str, &str, &str)] = &[
    ("src/plan/choose.rs", "src/plan/refuse.rs", "a refusal tries what would fit"),
];

type Path = Vec<String>;

/// One imported name: `use a::b as c` is c, a::b.
struct Use {
    name: String,
    path: Path,
    is_reexport: bool,
}

struct Source {
    file: String,
    uses: Vec<Use>,
    /// `a::b::c` outside of imports.
    paths: Vec<Path>,
    /// Words of the code outside of imports.
    words: BTreeSet<String>,
}

static IMPORT: LazyLock<Regex> = LazyLock::new(|| regex(r"(?m)^([ \t]*)(pub\S* )?use ([^;]+);"));
static DECLARATION: LazyLock<Regex> = LazyLock::new(|| regex(r"(?m)^.*\bmod \w+;$"));
static CHAIN: LazyLock<Regex> = LazyLock::new(|| regex(r"\w+(::\w+)+"));
static WORD: LazyLock<Regex> = LazyLock::new(|| regex(r"\w+"));
static GROUP: LazyLock<Regex> = LazyLock::new(|| regex(r"([\w:]*)\{([^{}]*)\}"));

fn regex(pattern: &str) -> Regex {
    Regex::new(pattern).expect("a pattern")
}

impl Source {
    fn parse(file: &File) -> Self {
        let code = code(&file.text);
        let code = code.split("#[cfg(test)]\nmod ").next().expect("a first part");
        let mut uses = Vec::new();
        for import in IMPORT.captures_iter(code) {
            for name in names(&import[3]).split(',').map(str::trim).filter(|name| !name.is_empty()) {
                let (path, alias) = name.split_once(" as ").unwrap_or((name, ""));
                let path: Path = path.split("::").filter(|s| !s.is_empty()).map(str::to_owned).collect();
                let name = if alias.is_empty() { path[path.len() - 1].clone() } else { alias.trim().to_owned() };
                // An inline module imports from the file that contains it.
                if path[0] != "super" || import[1].is_empty() {
                    uses.push(Use { name, path, is_reexport: import.get(2).is_some() });
                }
            }
        }
        let rest = IMPORT.replace_all(code, "");
        let rest = DECLARATION.replace_all(&rest, "");
        let chain = |found: regex::Match| found.as_str().split("::").map(str::to_owned).collect();
        let paths = CHAIN.find_iter(&rest).map(chain).collect();
        let words = WORD.find_iter(&rest).map(|word| word.as_str().to_owned()).collect();
        Self { file: file.name.clone(), uses, paths, words }
    }
}

/// The names of an import `a::{b, c as d, e::{self, f}}`: `a::b, a::c as d, a::e, a::e::f`.
fn names(tree: &str) -> String {
    let mut names = tree.to_owned();
    while GROUP.is_match(&names) {
        let each = |group: &Captures| {
            let parts = group[2].split(',').map(str::trim).filter(|part| !part.is_empty());
            parts.map(|part| format!("{}{part}", &group[1])).collect::<Vec<_>>().join(", ")
        };
        names = GROUP.replace_all(&names, each).into_owned();
    }
    names.replace("::self", "")
}

/// The sources by their module's path from the crate's root.
struct Tree(BTreeMap<Path, Source>);

static TREE: LazyLock<Tree> = LazyLock::new(Tree::read);

impl Tree {
    fn read() -> Self {
        let module = |name: &str| -> Path {
            let path = name["src/".len()..].trim_end_matches(".rs").trim_end_matches("/mod");
            if path == "lib" { Vec::new() } else { path.split('/').map(str::to_owned).collect() }
        };
        Self(files("src", &[".rs"]).iter().map(|file| (module(&file.name), Source::parse(file))).collect())
    }

    /// The file that `path` in the source of `module` names, from the crate's root; `None` for other crates.
    fn absolute(&self, module: &Path, path: &[String], is_import: bool) -> Option<Path> {
        let mut at = module.clone();
        let mut rest = path;
        match path[0].as_str() {
            "crate" => return Some(path[1..].to_vec()),
            "super" | "self" => {
                while let Some(("super" | "self", tail)) = rest.split_first().map(|(f, t)| (f.as_str(), t)) {
                    if rest[0] == "super" {
                        at.pop();
                    }
                    rest = tail;
                }
            }
            first if (path.len() > 1 || is_import) && self.0.contains_key(&[&at[..], &path[..1]].concat()) => {
                at.push(first.to_owned());
                rest = &rest[1..];
            }
            first => {
                let found = self.0[module].uses.iter().find(|u| u.name == first && u.path[0] != first)?;
                return self.absolute(module, &[&found.path[..], &rest[1..]].concat(), is_import);
            }
        }
        Some([&at[..], rest].concat())
    }

    /// The files on a path from the root: the one that defines the item, and all that re-export it. None if a whole
    /// module is imported.
    fn targets(&self, path: &[String], is_import: bool) -> Vec<&str> {
        let mut at = Vec::new();
        for (i, name) in path.iter().enumerate() {
            let child = [&at[..], std::slice::from_ref(name)].concat();
            let (is_module, is_last) = (self.0.contains_key(&child), i + 1 == path.len());
            match self.0[&at].uses.iter().find(|u| u.name == *name) {
                Some(found) if is_last || !is_module => {
                    let whole = [&found.path[..], &path[i + 1..]].concat();
                    let Some(whole) = self.absolute(&at, &whole, is_import) else { return Vec::new() };
                    let mut targets = self.targets(&whole, is_import);
                    targets.extend((!whole.starts_with(&at)).then_some(self.0[&at].file.as_str()));
                    return targets;
                }
                _ if is_module => at = child,
                _ => return vec![&self.0[&at].file],
            }
        }
        // A path in code never ends at a module: it is an item of that name.
        if is_import { Vec::new() } else { vec![self.0[&at].file.as_str()] }
    }

    /// All that a source names of this crate, and whether by an import.
    fn named(&self, module: &Path) -> Vec<(Path, bool)> {
        let source = &self.0[module];
        let is_index = |path: &Path| self.absolute(module, path, true).is_some_and(|path| path.starts_with(module));
        let used =
            source.uses.iter().filter(|u| !u.is_reexport || source.words.contains(&u.name) || !is_index(&u.path));
        let imports = used.map(|u| (&u.path, true)).chain(source.paths.iter().map(|path| (path, false)));
        imports.filter_map(|(path, is_import)| Some((self.absolute(module, path, is_import)?, is_import))).collect()
    }
}

/// The level of each module, from the table in `src/lib.rs`.
fn levels() -> BTreeMap<String, usize> {
    let row = regex(r"(?m)^//! \| (\d+) \| (`.*`) \|$");
    let lib = std::fs::read_to_string(super::source::root().join("src/lib.rs")).expect("src/lib.rs");
    let modules = row.captures_iter(&lib).flat_map(|row| {
        let level = row[1].parse().expect("a number");
        row[2].split(' ').map(|name| (name.trim_matches('`').to_owned(), level)).collect::<Vec<_>>()
    });
    modules.collect()
}

#[test]
fn every_module_has_a_level_and_imports_go_strictly_down() {
    let (levels, mut faults) = (levels(), BTreeSet::new());
    for (path, source) in TREE.0.iter().filter(|(path, _)| !path.is_empty() && path[0] != "main") {
        let module = &path[0];
        let Some(&level) = levels.get(module) else {
            faults.insert(format!("{}: module {module} has no level", source.file));
            continue;
        };
        for (named, _) in TREE.named(path) {
            let target =
                named.first().filter(|target| *target != module).and_then(|target| levels.get_key_value(target));
            // Modules of level 0 may import each other. Other modules of one level may not.
            let Some((target, other)) = target.filter(|(_, other)| **other > level.saturating_sub(1)) else { continue };
            faults.insert(format!("{}: {module} (level {level}) imports {target} ({other})", source.file));
        }
    }
    none(faults);
}

type Graph<'a> = BTreeMap<&'a str, BTreeSet<&'a str>>;

/// The rest of a graph without some dependencies and without files that are on no cycle. Such files depend on no
/// remaining file, or no remaining file depends on them.
fn cycles<'a>(graph: &Graph<'a>, without: impl Fn(&str, &str) -> bool) -> Graph<'a> {
    let mut left = graph.clone();
    for (from, all) in &mut left {
        all.retain(|to| !without(from, to));
    }
    loop {
        let named: BTreeSet<&str> = left.values().flatten().copied().collect();
        let before = left.len();
        left.retain(|file, all| !all.is_empty() && named.contains(file));
        if left.len() == before {
            return left;
        }
        let files: BTreeSet<&str> = left.keys().copied().collect();
        for all in left.values_mut() {
            all.retain(|file| files.contains(file));
        }
    }
}

#[test]
fn there_is_no_cycle_between_files() {
    let dependencies = |(module, source): (&Path, &'_ Source)| {
        let named = TREE.named(module);
        let files = named.iter().flat_map(|(path, is_import)| TREE.targets(path, *is_import));
        files.filter(|file| *file != source.file).map(str::to_owned).collect::<BTreeSet<_>>()
    };
    let owned: Vec<_> = TREE.0.iter().map(|entry| (entry.1.file.clone(), dependencies(entry))).collect();
    let graph: Graph = owned.iter().map(|(f, all)| (f.as_str(), all.iter().map(String::as_str).collect())).collect();
    let mut faults = Vec::new();
    for (from, to, why) in ALLOWED {
        let others = |a: &str, b: &str| ALLOWED.iter().any(|(f, t, _)| (a, b) == (f, t) && (a, b) != (from, to));
        if !cycles(&graph, others).get(from).is_some_and(|all| all.contains(to)) {
            faults.push(format!("{from} -> {to} closes no cycle any more: take it off the list ({why})"));
        }
    }
    let all = |a: &str, b: &str| ALLOWED.iter().any(|(from, to, _)| (a, b) == (*from, *to));
    faults.extend(cycles(&graph, all).iter().map(|(file, all)| format!("on a cycle: {file} -> {all:?}")));
    none(faults);
}
