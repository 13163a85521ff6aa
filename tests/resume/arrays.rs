//! The arrays of `rollouts.h5`.

use std::collections::BTreeMap;
use std::path::Path;

/// One recorded step: arrays by name, all of whose numbers f64 holds exactly.
pub type Arrays = BTreeMap<String, Vec<f64>>;

/// Every step of `rollouts.h5`, by group name.
pub fn read(path: &Path) -> BTreeMap<String, Arrays> {
    if !path.exists() {
        return BTreeMap::new();
    }
    let file = hdf5::File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let step = |name: String| {
        let group = file.group(&name).unwrap_or_else(|e| panic!("{name}: {e}"));
        let read = |array: String| {
            let values = group.dataset(&array).and_then(|set| set.read_raw::<f64>());
            (array.clone(), values.unwrap_or_else(|e| panic!("{name}/{array}: {e}")))
        };
        let arrays = group.member_names().expect("a group lists its members").into_iter().map(read).collect();
        (name, arrays)
    };
    file.member_names().expect("a file lists its members").into_iter().map(step).collect()
}

/// Equal to the bit.
pub fn assert_same(mine: &Arrays, theirs: &Arrays, who: &str) {
    assert_eq!(mine.len(), theirs.len(), "{who}");
    for (name, mine) in mine {
        let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(mine) == bits(&theirs[name]), "{who}: {name} is {mine:?} and {:?}", theirs[name]);
    }
}
