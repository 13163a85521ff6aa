//! No cycle between files of `src/`.
//!
//! A file depends on another where one of its paths (`crate::a::B`, `super::b::f`, `module::f` of an imported module)
//! ends at an item that the other defines. A re-export is followed to the file that defines the item, and is no
//! dependency of the file that re-exports it; `mod a;` and the import of a whole module are none by themselves.

use super::none;
use super::source::{File, code, files};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Dependencies that close a cycle and stay: from, to, why. This list may only shrink.
const ALLOWED: &[(&str, &str, &str)] = &[
    ("src/ops/linear_logprob.rs", "src/ops/linear_logprob_cuda.rs", "one operation, cut in two for its length"),
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

impl Source {
    fn parse(file: &File) -> Self {
        let code = code(&file.text);
        let code = code.split("#[cfg(test)]\nmod ").next().expect("a first part");
        let (mut uses, mut rest) = (Vec::new(), String::new());
        let mut at = 0;
        while let Some(start) = next_use(code, at) {
            let end = start + code[start..].find(';').expect("an import ends");
            rest.push_str(&code[at..start]);
            let before = code[..start].lines().last().unwrap_or_default().trim();
            tree(&code[start + "use ".len()..end], &[], before.starts_with("pub"), &mut uses);
            at = end + 1;
        }
        rest.push_str(&code[at..]);
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let chains = rest.split(|c: char| !is_word(c) && c != ':').filter(|chain| chain.contains("::"));
        let paths = chains.map(|chain| chain.split("::").map(|s| s.trim_matches(':').to_owned()).collect()).collect();
        let is_declaration = |line: &&str| line.contains("mod ") && line.ends_with(';');
        let words = rest.lines().filter(|line| !is_declaration(line)).flat_map(|line| line.split(|c| !is_word(c)));
        let words = words.map(str::to_owned).collect();
        Self { file: file.name.clone(), uses, paths, words }
    }
}

/// Where the next `use` at the beginning of a statement stands.
fn next_use(code: &str, from: usize) -> Option<usize> {
    code[from..].match_indices("use ").map(|(at, _)| from + at).find(|&at| {
        let line = code[..at].rsplit('\n').next().unwrap_or_default().trim();
        line.is_empty() || (line.starts_with("pub") && !line.contains(' '))
    })
}

/// The names of an import tree `a::{b, c as d, e::{self, f}}`.
fn tree(text: &str, prefix: &[String], is_reexport: bool, uses: &mut Vec<Use>) {
    let text = text.trim();
    let head = text.split('{').next().expect("a first part");
    let (head, alias) = head.split_once(" as ").unwrap_or((head, ""));
    let mut path = prefix.to_vec();
    path.extend(head.split("::").map(|s| s.trim().to_owned()).filter(|s| !s.is_empty() && s != "self"));
    if let Some(open) = text.find('{') {
        let inner = &text[open + 1..text.rfind('}').expect("a group ends")];
        let (mut depth, mut start) = (0, 0);
        for (i, c) in inner.char_indices().chain([(inner.len(), ',')]) {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 0 => {
                    if !inner[start..i].trim().is_empty() {
                        tree(&inner[start..i], &path, is_reexport, uses);
                    }
                    start = i + 1;
                }
                _ => {}
            }
        }
    } else if let Some(last) = path.last() {
        let name = if alias.is_empty() { last.clone() } else { alias.trim().to_owned() };
        uses.push(Use { name, path, is_reexport });
    }
}

/// The sources by their module's path from the crate's root.
struct Tree(BTreeMap<Path, Source>);

impl Tree {
    fn of(files: &[File]) -> Self {
        let module = |name: &str| -> Path {
            let path = name["src/".len()..].trim_end_matches(".rs").trim_end_matches("/mod");
            if path == "lib" { Vec::new() } else { path.split('/').map(str::to_owned).collect() }
        };
        Self(files.iter().map(|file| (module(&file.name), Source::parse(file))).collect())
    }

    /// The file that defines what `path` in the source of `module` names; none for what is not of this crate, and for a
    /// whole module that is imported.
    fn target(&self, module: &Path, path: &[String], is_import: bool, depth: usize) -> Option<&str> {
        assert!(depth < 20, "{path:?} in {module:?} is re-exported by what it re-exports");
        let source = &self.0[module];
        let mut at: Path;
        let mut rest = path;
        match path[0].as_str() {
            "crate" => (at, rest) = (Vec::new(), &rest[1..]),
            "super" | "self" => {
                at = module.clone();
                while let Some(("super" | "self", tail)) = rest.split_first().map(|(f, t)| (f.as_str(), t)) {
                    if rest[0] == "super" {
                        at.pop();
                    }
                    rest = tail;
                }
            }
            first => {
                let child = [&module[..], &[first.to_owned()]].concat();
                if self.0.contains_key(&child) && (path.len() > 1 || is_import) {
                    (at, rest) = (child, &rest[1..]);
                } else {
                    let found = source.uses.iter().find(|u| u.name == first && u.path[0] != first)?;
                    let whole = [&found.path[..], &rest[1..]].concat();
                    return self.target(module, &whole, is_import, depth + 1);
                }
            }
        }
        while let Some((name, tail)) = rest.split_first() {
            let child = [&at[..], std::slice::from_ref(name)].concat();
            let reexport = self.0[&at].uses.iter().find(|u| u.name == *name);
            match reexport {
                Some(found) if tail.is_empty() || !self.0.contains_key(&child) => {
                    let whole = [&found.path[..], tail].concat();
                    return self.target(&at, &whole, is_import, depth + 1);
                }
                _ if self.0.contains_key(&child) => at = child,
                _ => return Some(&self.0[&at].file),
            }
            rest = tail;
        }
        // A path in code never ends at a module: it is an item of that name.
        (!is_import).then(|| self.0[&at].file.as_str())
    }

    /// What each file depends on.
    fn dependencies(&self) -> BTreeMap<&str, BTreeSet<&str>> {
        let mut out = BTreeMap::new();
        for (module, source) in &self.0 {
            let used = source.uses.iter().filter(|u| !u.is_reexport || source.words.contains(&u.name));
            let imports = used.filter_map(|u| self.target(module, &u.path, true, 0));
            let paths = source.paths.iter().filter_map(|path| self.target(module, path, false, 0));
            let own = source.file.as_str();
            out.insert(own, imports.chain(paths).filter(|file| *file != own).collect());
        }
        out
    }
}

/// Takes out what lies on no cycle: files that depend on nothing that is left, or that nothing left depends on.
fn prune(graph: &mut BTreeMap<&str, BTreeSet<&str>>) {
    loop {
        let named: BTreeSet<&str> = graph.values().flatten().copied().collect();
        let before = graph.len();
        graph.retain(|file, all| !all.is_empty() && named.contains(file));
        if graph.len() == before {
            return;
        }
        let left: BTreeSet<&str> = graph.keys().copied().collect();
        for all in graph.values_mut() {
            all.retain(|file| left.contains(file));
        }
    }
}

/// The shortest way from one file to another.
fn way<'a>(graph: &BTreeMap<&'a str, BTreeSet<&'a str>>, from: &'a str, to: &str) -> Option<Vec<&'a str>> {
    let mut before: BTreeMap<&str, &str> = BTreeMap::new();
    let mut open = VecDeque::from([from]);
    while let Some(file) = open.pop_front() {
        if file == to {
            let mut way = vec![file];
            while *way.last().expect("a way") != from {
                way.push(before[way.last().expect("a way")]);
            }
            way.reverse();
            return Some(way);
        }
        for next in &graph[file] {
            if *next != from && !before.contains_key(next) {
                before.insert(next, file);
                open.push_back(next);
            }
        }
    }
    None
}

#[test]
fn there_is_no_cycle_between_files() {
    let tree = Tree::of(&files("src", &[".rs"]));
    let mut graph = tree.dependencies();
    prune(&mut graph);
    let mut faults = Vec::new();
    for (from, to, why) in ALLOWED {
        let closes = graph.get(from).is_some_and(|all| all.contains(to)) && way(&graph, to, from).is_some();
        if !closes {
            faults.push(format!("{from} -> {to} closes no cycle any more: take it off the list ({why})"));
        }
    }
    for (from, to, _) in ALLOWED {
        graph.entry(from).or_default().remove(to);
    }
    prune(&mut graph);
    let mut seen = BTreeSet::new();
    let edges: Vec<(&str, &str)> = graph.iter().flat_map(|(from, all)| all.iter().map(|to| (*from, *to))).collect();
    for (from, to) in edges {
        let Some(way) = way(&graph, to, from) else { continue };
        let mut cycle = way.clone();
        cycle.sort_unstable();
        if seen.insert(cycle) {
            faults.push(format!("{} -> {to}", way.join(" -> ")));
        }
    }
    none(&faults);
}
