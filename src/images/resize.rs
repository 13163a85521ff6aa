//! Bicubic resizing with antialiasing, with the same bits as Pillow's `resize(..., BICUBIC)` on any machine.
//!
//! Torchvision, which the processors of `transformers` 5 use by default, differs from it by at most 1 of 255 in a value,
//! and by the instructions of the CPU. Data sets are opened with Pillow, and its arithmetic is in integers. Rows come
//! before columns, as in Pillow before 12.3 and in torchvision. Pillow 13 begins with the columns if the height shrinks by
//! more than twice as many pixels as the width: the same pixels, but for a few of 255 next to hard edges, where the first
//! pass cuts off what exceeds 8 bits.

use super::decode::Pixels;

/// Binary places of a weight.
const PLACES: u32 = 32 - 8 - 2;

/// The weights of one output value: the first input, and a weight for each input from there.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

/// The cubic of Keys with a = -1/2, at distance `x` of the center.
fn bicubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

/// The weights of all outputs. If there are fewer outputs than inputs, the cubic is as much wider.
fn taps(inputs: usize, outputs: usize) -> Vec<Taps> {
    let scale = inputs as f64 / outputs as f64;
    let wider = scale.max(1.0);
    let support = 2.0 * wider;
    let of_output = |i: usize| {
        let center = (i as f64 + 0.5) * scale;
        // Conversions cut off, and negative numbers become 0.
        let first = (center - support + 0.5) as usize;
        let end = ((center + support + 0.5) as usize).min(inputs);
        let weight = |x: usize| bicubic((x as f64 - center + 0.5) * (1.0 / wider));
        let weights: Vec<f64> = (first..end).map(weight).collect();
        let sum: f64 = weights.iter().sum();
        let fixed = |weight: f64| {
            let weight = if sum == 0.0 { weight } else { weight / sum } * f64::from(1 << PLACES);
            (weight + 0.5_f64.copysign(weight)) as i32
        };
        Taps { first, weights: weights.into_iter().map(fixed).collect() }
    };
    (0..outputs).map(of_output).collect()
}

fn rounded(sum: i32) -> u8 {
    (sum >> PLACES).clamp(0, 255) as u8
}

/// `image` in another size: first its rows, then its columns, with 8-bit values in between.
pub(super) fn resize(mut image: Pixels, height: usize, width: usize) -> Pixels {
    const HALF: i32 = 1 << (PLACES - 1);
    if width != image.width {
        let columns = taps(image.width, width);
        let mut rgb = Vec::with_capacity(image.height * width * 3);
        for row in image.rgb.chunks_exact(image.width * 3) {
            for Taps { first, weights } in &columns {
                let mut sums = [HALF; 3];
                for (value, weight) in row[3 * first..].chunks_exact(3).zip(weights) {
                    sums.iter_mut().zip(value).for_each(|(sum, value)| *sum += i32::from(*value) * weight);
                }
                rgb.extend(sums.map(rounded));
            }
        }
        image = Pixels { height: image.height, width, rgb };
    }
    if height != image.height {
        let mut rgb = Vec::with_capacity(height * width * 3);
        let mut sums = vec![HALF; width * 3];
        for Taps { first, weights } in taps(image.height, height) {
            sums.fill(HALF);
            for (row, weight) in image.rgb[first * width * 3..].chunks_exact(width * 3).zip(weights) {
                sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += i32::from(*value) * weight);
            }
            rgb.extend(sums.iter().map(|sum| rounded(*sum)));
        }
        image = Pixels { height, width, rgb };
    }
    image
}
