//! The handwritten digits that ship with the project (examples/digits, with their attribution).

use super::model::{CLASSES, INPUTS};

const TEXT: &[u8] = include_bytes!("../../../examples/digits/digits.txt");

/// Every so many images, the last one is kept for the test of accuracy, and is never trained on. Taken
/// from all over the file, whose writers and difficulty change along it.
pub const HELD_OUT_EVERY: usize = 5;

/// One image, with intensities from 0 to 1, and the digit that it shows.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub pixels: [f32; INPUTS],
    pub digit: u8,
}

/// The data set, cut into what is trained on and what is not.
#[derive(Debug)]
pub struct Digits {
    pub train: Vec<Sample>,
    pub held_out: Vec<Sample>,
}

/// A line of the data set is damaged.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line} of the digits is damaged; restore examples/digits/digits.txt")]
pub struct DataError {
    pub line: usize,
}

impl Digits {
    /// The data set in this program.
    ///
    /// # Errors
    /// The file was damaged when the program was built.
    pub fn load() -> Result<Digits, DataError> {
        let (mut train, mut held_out) = (Vec::new(), Vec::new());
        for (i, sample) in parse(TEXT)?.into_iter().enumerate() {
            if (i + 1).is_multiple_of(HELD_OUT_EVERY) {
                held_out.push(sample);
            } else {
                train.push(sample);
            }
        }
        Ok(Digits { train, held_out })
    }
}

fn parse(text: &[u8]) -> Result<Vec<Sample>, DataError> {
    text.split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .enumerate()
        .map(|(i, line)| sample(line).ok_or(DataError { line: i + 1 }))
        .collect()
}

fn sample(line: &[u8]) -> Option<Sample> {
    let (pixels, rest) = line.split_first_chunk::<INPUTS>()?;
    let digit = match rest {
        [b' ', digit] => digit
            .checked_sub(b'0')
            .filter(|d| usize::from(*d) < CLASSES)?,
        _ => return None,
    };
    let mut sample = Sample {
        pixels: [0.0; INPUTS],
        digit,
    };
    for (to, from) in sample.pixels.iter_mut().zip(pixels) {
        // 17 intensities: 0 to 16, one character each.
        *to = char::from(*from).to_digit(17)? as f32 / 16.0;
    }
    Some(sample)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_data_set_is_there() {
        let digits = Digits::load().unwrap();
        assert_eq!((digits.train.len(), digits.held_out.len()), (1438, 359));
        // The class counts that the data set's description gives.
        let mut counts = [0; CLASSES];
        for sample in digits.train.iter().chain(&digits.held_out) {
            counts[usize::from(sample.digit)] += 1;
        }
        assert_eq!(counts, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]);
        let first = &digits.train[0];
        assert_eq!(first.digit, 0);
        assert_eq!(
            first.pixels[..6],
            [0.0, 0.0, 5.0, 13.0, 9.0, 1.0].map(|p| p / 16.0)
        );
    }

    #[test]
    fn damage_is_named_by_its_line() {
        let line = |c: char, digit: char| format!("{}{digit}\n", c.to_string().repeat(64) + " ");
        let good = line('g', '9');
        assert_eq!(parse(good.as_bytes()).unwrap()[0].pixels, [1.0; INPUTS]);
        for bad in [line('h', '1'), line('0', 'x'), "00 1\n".to_owned()] {
            let text = good.clone() + &bad;
            assert_eq!(parse(text.as_bytes()), Err(DataError { line: 2 }), "{bad}");
        }
    }
}
