//! What differs in the weights of two models, tensor by tensor.

use crate::error::Result;
use crate::model::ParamSpec;
use crate::model::load::Source;
use crate::tensor::DType;
use twox_hash::XxHash3_64;

/// The number of elements read at a time.
const PIECE: usize = 4 << 20;
/// The most elements that count as single ones.
const SINGLE_MAX: usize = 8;
/// The largest change, relative to the norm, that training makes between nearby steps.
const LITTLE: f64 = 0.1;

/// How a tensor of the second model differs from that of the first.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// The first one's transpose.
    Transposed,
    /// The first (or the second) one rounded to bf16.
    Rounded { second: bool },
    /// The same rows in another order.
    RowsMoved,
    /// A few elements: their number, the first one's row and column, and its values.
    Single { count: usize, at: (usize, usize), values: [f32; 2] },
    /// Everywhere a little: the norm of the change relative to that of the tensor, and the largest change of an element.
    Little { relative: f64, largest: f64 },
    /// Everywhere, and much.
    Other { relative: f64 },
}

/// The tensors of two models of one shape that differ, by name, and the number of all tensors.
///
/// # Errors
/// `Data` if a value is NaN or infinite.
pub fn changes(a: &Source, b: &Source) -> Result<(Vec<(String, Change)>, usize)> {
    let mut found = Vec::new();
    for spec in a.table.specs() {
        if let Some(change) = change(spec, a, b)? {
            found.push((spec.name.clone(), change));
        }
    }
    Ok((found, a.table.specs().len()))
}

/// Sums over the elements of a tensor in both models.
#[derive(Default)]
struct Found {
    differ: usize,
    first: Option<(usize, [f32; 2])>,
    change: f64,
    norm: f64,
    largest: f64,
    /// Elements that are not the other one's in bf16: second of first, first of second.
    unlike: [usize; 2],
    /// Sums of the hashes of rows.
    rows: [u64; 2],
}

impl Found {
    fn add(&mut self, at: usize, a: f32, b: f32) {
        self.norm += f64::from(a).powi(2);
        if a.to_bits() == b.to_bits() {
            return;
        }
        self.differ += 1;
        self.first.get_or_insert((at, [a, b]));
        let change = (f64::from(a) - f64::from(b)).abs();
        self.change += change * change;
        self.largest = self.largest.max(change);
        for (unlike, (from, to)) in self.unlike.iter_mut().zip([(a, b), (b, a)]) {
            *unlike += usize::from(half::bf16::from_f32(from).to_f32().to_bits() != to.to_bits());
        }
    }
}

fn change(spec: &ParamSpec, a: &Source, b: &Source) -> Result<Option<Change>> {
    let (n, k) = spec.dims();
    let (mut found, each) = (Found::default(), (PIECE / k.max(1)).max(1));
    let mut rooms = [Vec::new(), Vec::new()];
    for first in (0..n).step_by(each) {
        let rows = each.min(n - first);
        for (room, source) in rooms.iter_mut().zip([a, b]) {
            room.resize(rows * k, 0.0);
            source.read(&spec.name, first * k, room)?;
        }
        let [a, b] = &rooms;
        if a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()) && found.differ == 0 {
            found.norm += a.iter().map(|a| f64::from(*a).powi(2)).sum::<f64>();
            let rows = hash_of_rows(a, k);
            found.rows.iter_mut().for_each(|sum| *sum = sum.wrapping_add(rows));
            continue;
        }
        a.iter().zip(b).enumerate().for_each(|(i, (a, b))| found.add(first * k + i, *a, *b));
        for (sum, room) in found.rows.iter_mut().zip([a, b]) {
            *sum = sum.wrapping_add(hash_of_rows(room, k));
        }
    }
    let Some((at, values)) = found.first else { return Ok(None) };
    let relative = (found.change / found.norm.max(1e-60)).sqrt();
    Ok(Some(match () {
        () if found.unlike[0] == 0 => Change::Rounded { second: true },
        () if found.unlike[1] == 0 => Change::Rounded { second: false },
        () if found.differ <= SINGLE_MAX => Change::Single { count: found.differ, at: (at / k, at % k), values },
        () if n > 1 && found.rows[0] == found.rows[1] => Change::RowsMoved,
        () if n == k && is_transposed(spec, a, b)? => Change::Transposed,
        () if relative < LITTLE => Change::Little { relative, largest: found.largest },
        () => Change::Other { relative },
    }))
}

fn hash_of_rows(values: &[f32], k: usize) -> u64 {
    let rows = values.chunks_exact(k.max(1));
    rows.fold(0u64, |sum, row| sum.wrapping_add(XxHash3_64::oneshot(bytemuck::cast_slice(row))))
}

fn is_transposed(spec: &ParamSpec, a: &Source, b: &Source) -> Result<bool> {
    let (n, k) = spec.dims();
    let whole = |source: &Source| {
        let mut values = vec![0.0; n * k];
        source.read(&spec.name, 0, &mut values).map(|()| values)
    };
    let (a, b) = (whole(a)?, whole(b)?);
    Ok((0..n).all(|r| (0..k).all(|c| a[r * k + c].to_bits() == b[c * k + r].to_bits())))
}

/// The number of tensors whose names are listed.
const LISTED: usize = 4;

/// Sentences about all changes, with the cause by name. `names` are those of the two models.
pub fn describe(changes: &[(String, Change)], all: usize, names: [&str; 2]) -> Vec<String> {
    let [a, b] = names;
    let mut said = Vec::new();
    let of = |is: fn(&Change) -> bool| changes.iter().filter(|(_, change)| is(change)).collect::<Vec<_>>();
    let listed = |of: &[&(String, Change)]| {
        let shown = of.iter().take(LISTED).map(|(name, _)| name.as_str()).collect::<Vec<_>>().join(", ");
        if of.len() > LISTED { format!("{shown} and {} more", of.len() - LISTED) } else { shown }
    };
    let are = |of: &[&(String, Change)]| if of.len() == 1 { "is" } else { "are" };
    let transposed = of(|change| *change == Change::Transposed);
    if !transposed.is_empty() {
        said.push(format!("{} {} transposed in {b}", listed(&transposed), are(&transposed)));
    }
    let moved = of(|change| *change == Change::RowsMoved);
    if !moved.is_empty() {
        said.push(format!("{} {} in {b} with rows in another order", listed(&moved), are(&moved)));
    }
    said.extend(changes.iter().filter_map(|(name, change)| describe_single(name, change, names)));
    for (second, whose) in [(true, [b, a]), (false, [a, b])] {
        let rounded: Vec<_> = changes.iter().filter(|(_, change)| *change == Change::Rounded { second }).collect();
        if !rounded.is_empty() {
            let [rounded_one, exact] = whose;
            said.push(format!(
                "bf16: {} of {all} tensors of {rounded_one} are those of {exact}, rounded to {}",
                rounded.len(),
                DType::Bf16.name()
            ));
        }
    }
    said.extend(describe_little(changes, all));
    let other = of(|change| matches!(change, Change::Other { .. }));
    if !other.is_empty() {
        said.push(format!("{} of {all} tensors have other values: {}", other.len(), listed(&other)));
    }
    said
}

/// A sentence about a change of a few elements.
fn describe_single(name: &str, change: &Change, [a, b]: [&str; 2]) -> Option<String> {
    let Change::Single { count, at: (row, column), values: [x, y] } = change else { return None };
    let bits = x.to_bits() ^ y.to_bits();
    let flip = match bits.count_ones() {
        1 => format!(", which is bit {} flipped", bits.trailing_zeros()),
        _ => String::new(),
    };
    let others = if *count > 1 { format!(", and {} more elements differ", count - 1) } else { String::new() };
    Some(format!("{name} [{row}, {column}] is {x:e} in {a} and {y:e} in {b}{flip}{others}"))
}

/// A sentence about changes as those of a training step.
fn describe_little(changes: &[(String, Change)], all: usize) -> Option<String> {
    let little: Vec<(f64, f64)> = changes
        .iter()
        .filter_map(|(_, change)| match change {
            Change::Little { relative, largest } => Some((*relative, *largest)),
            _ => None,
        })
        .collect();
    let most = |of: fn(&(f64, f64)) -> f64| little.iter().map(of).fold(0.0, f64::max);
    (!little.is_empty()).then(|| {
        format!(
            "stale weights: {} of {all} tensors differ a little everywhere, by up to {:.1e} of their norm and {:.1e} in an \
             element; they are of another training step",
            little.len(),
            most(|of| of.0),
            most(|of| of.1)
        )
    })
}
