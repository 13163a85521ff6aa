//! The arrays of `rollouts.h5`.

use hdf5::types::VarLenUnicode;
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
        let names = |group: &hdf5::Group| group.member_names().expect("a group lists its members").into_iter();
        let scores = group.group("scores").expect("the scores of each reward");
        let scores = names(&scores).map(|reward| format!("scores/{reward}"));
        let read = |array: String| {
            let values = numbers(&group.dataset(&array).expect("an array"));
            (array.clone(), values.unwrap_or_else(|e| panic!("{name}/{array}: {e}")))
        };
        let arrays = names(&group).filter(|array| array != "scores").chain(scores).map(read).collect();
        (name.clone(), arrays)
    };
    file.member_names().expect("a file lists its members").into_iter().map(step).collect()
}

/// Texts as the bytes that they are made of.
fn numbers(set: &hdf5::Dataset) -> hdf5::Result<Vec<f64>> {
    if set.dtype()? != hdf5::Datatype::from_type::<VarLenUnicode>()? {
        return set.read_raw();
    }
    let texts = set.read_raw::<VarLenUnicode>()?;
    Ok(texts.iter().flat_map(|text| text.bytes().chain([0])).map(f64::from).collect())
}

/// Equal to the bit.
pub fn assert_same(mine: &Arrays, theirs: &Arrays, who: &str) {
    assert_eq!(mine.len(), theirs.len(), "{who}");
    for (name, mine) in mine {
        let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert!(bits(mine) == bits(&theirs[name]), "{who}: {name} is {mine:?} and {:?}", theirs[name]);
    }
}
