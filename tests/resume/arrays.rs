//! The arrays of `rollouts.h5`.

use std::collections::BTreeMap;
use std::path::Path;

const FLOATS: [&str; 9] =
    ["logprobs", "sample_logprobs", "ref_logprobs", "values", "kl", "rewards", "advantages", "returns", "score"];
const WHOLE: [&str; 8] =
    ["tokens", "token_offsets", "prompt_tokens", "response_offsets", "mask", "prompt_id", "sample", "finish"];

/// One recorded step.
#[derive(Clone, Debug)]
pub struct Arrays {
    pub floats: BTreeMap<String, Vec<f32>>,
    pub whole: BTreeMap<String, Vec<i64>>,
}

/// Every step of `rollouts.h5`, by group name.
pub fn read(path: &Path) -> BTreeMap<String, Arrays> {
    if !path.exists() {
        return BTreeMap::new();
    }
    let file = hdf5::File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let names = file.member_names().expect("a file lists its members");
    names
        .into_iter()
        .map(|name| {
            let group = file.group(&name).unwrap_or_else(|e| panic!("{name}: {e}"));
            let floats = FLOATS.map(|array| {
                let set = group.dataset(array).unwrap_or_else(|e| panic!("{name}/{array}: {e}"));
                (array.to_string(), set.read_raw::<f32>().expect("f32"))
            });
            let whole = WHOLE.map(|array| {
                let set = group.dataset(array).unwrap_or_else(|e| panic!("{name}/{array}: {e}"));
                (array.to_string(), set.read_raw::<i64>().expect("whole numbers"))
            });
            (name, Arrays { floats: floats.into(), whole: whole.into() })
        })
        .collect()
}

impl Arrays {
    pub fn float(&self, name: &str) -> &[f32] {
        &self.floats[name]
    }

    pub fn whole(&self, name: &str) -> &[i64] {
        &self.whole[name]
    }

    /// Equal to the bit.
    pub fn assert_same(&self, other: &Self, who: &str) {
        assert_eq!(self.whole, other.whole, "{who}");
        for (name, mine) in &self.floats {
            let theirs = &other.floats[name];
            assert_eq!(mine.len(), theirs.len(), "{who}: {name}");
            for (i, (a, b)) in mine.iter().zip(theirs).enumerate() {
                assert_eq!(a.to_bits(), b.to_bits(), "{who}: {name}[{i}] is {a} and {b}");
            }
        }
    }
}
