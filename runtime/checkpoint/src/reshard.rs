//! Which bytes of which files make up a slice, whatever slices the files hold. Pure arithmetic.

use crate::manifest::Tensor;
use crate::slice::Slice;

/// Overlap of a slice in a file and a wanted slice, as runs of bytes that are contiguous
/// in both. Runs ascend in the file; every byte of the overlap is in exactly one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// Index into the manifest's files.
    pub file: u32,
    /// Where the first run begins in the file.
    src: u64,
    /// Where it goes in the wanted slice.
    dst: u64,
    /// Bytes of each run.
    run: u64,
    /// The loops around a run, outermost first.
    loops: Vec<Loop>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Loop {
    count: u64,
    src_stride: u64,
    dst_stride: u64,
}

/// One run of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Where it lies in the file.
    pub src: u64,
    /// Where it goes in the wanted slice.
    pub dst: u64,
    pub bytes: u64,
}

/// The overlaps of the wanted slice with what the files hold of the tensor, which the caller has
/// checked (`Manifest::check`). They make up the wanted slice, each byte once.
pub fn overlaps<'a>(tensor: &'a Tensor, wanted: &'a Slice) -> impl Iterator<Item = Overlap> + 'a {
    let size = tensor.dtype.size();
    tensor.slices.iter().filter_map(move |placed| {
        let both = placed.slice.intersect(wanted)?;
        // An empty tensor's slice overlaps in nothing; a scalar's in everything.
        (placed.bytes > 0)
            .then(|| overlap(placed.file, placed.at, &placed.slice, wanted, &both, size))
    })
}

fn overlap(file: u32, at: u64, from: &Slice, to: &Slice, both: &Slice, size: u64) -> Overlap {
    let mut overlap = Overlap {
        file,
        src: at,
        dst: 0,
        run: size,
        loops: Vec::new(),
    };
    // From the innermost dimension out: as long as a run is the whole of a row in both, the next
    // dimension makes it longer; from there on dimensions are loops.
    let (mut src_stride, mut dst_stride) = (size, size);
    let mut contiguous = true;
    for dim in (0..both.extent.len()).rev() {
        overlap.src += (both.offset[dim] - from.offset[dim]) * src_stride;
        overlap.dst += (both.offset[dim] - to.offset[dim]) * dst_stride;
        let count = both.extent[dim];
        if contiguous {
            overlap.run *= count;
            contiguous = count == from.extent[dim] && count == to.extent[dim];
        } else if count > 1 {
            overlap.loops.push(Loop {
                count,
                src_stride,
                dst_stride,
            });
        }
        src_stride *= from.extent[dim];
        dst_stride *= to.extent[dim];
    }
    overlap.loops.reverse();
    overlap
}

impl Overlap {
    /// How many runs it has.
    pub fn runs(&self) -> u64 {
        self.loops.iter().map(|l| l.count).product()
    }

    /// Bytes that it has in common.
    pub fn bytes(&self) -> u64 {
        self.run * self.runs()
    }

    /// The bytes of the file from its first run's begin to its last one's end.
    pub fn span(&self) -> (u64, u64) {
        let last = self.run_at(self.runs() - 1);
        (self.src, last.src + last.bytes)
    }

    /// The run of this number, which is less than [`Overlap::runs`].
    fn run_at(&self, mut number: u64) -> Run {
        let (mut src, mut dst) = (self.src, self.dst);
        for l in self.loops.iter().rev() {
            src += number % l.count * l.src_stride;
            dst += number % l.count * l.dst_stride;
            number /= l.count;
        }
        Run {
            src,
            dst,
            bytes: self.run,
        }
    }

    /// The runs within these bytes of the file, cut to them.
    pub fn within(&self, begin: u64, end: u64) -> impl Iterator<Item = Run> + '_ {
        // The first run that does not end before the range: runs ascend, so by bisection.
        let (mut low, mut high) = (0, self.runs());
        while low < high {
            let middle = low + (high - low) / 2;
            match self.run_at(middle).src + self.run <= begin {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        (low..self.runs())
            .map(|number| self.run_at(number))
            .take_while(move |run| run.src < end)
            .map(move |run| {
                let skip = begin.saturating_sub(run.src);
                Run {
                    src: run.src + skip,
                    dst: run.dst + skip,
                    bytes: (run.src + run.bytes).min(end) - (run.src + skip),
                }
            })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::{ramp, read_slice, tensor_of, tiling};

    proptest! {
        /// Any slicing to any slicing, against element by element.
        #[test]
        fn every_byte_comes_from_where_it_lies(
            (shape, size, cuts) in (proptest::collection::vec(1u64..6, 0..4), 0usize..4, any::<u64>()),
            (target, window) in (any::<u64>(), 1u64..60),
        ) {
            let dtype = [crate::Dtype::U8, crate::Dtype::BF16, crate::Dtype::F32, crate::Dtype::F64][size];
            let whole = ramp(&shape, dtype.size());
            let (tensor, files) = tensor_of(&shape, dtype, &tiling(&shape, cuts), &whole);
            for wanted in tiling(&shape, target) {
                let expected = read_slice(&whole, &shape, &wanted, dtype.size());
                let mut got = vec![0xaa; expected.len()];
                let mut filled = 0;
                for overlap in overlaps(&tensor, &wanted) {
                    let (begin, end) = overlap.span();
                    let mut of_this = 0;
                    // In windows, as chunks are.
                    for from in (begin / window..).map(|k| k * window).take_while(|from| *from < end) {
                        for run in overlap.within(from, from + window) {
                            prop_assert!(run.src >= from && run.src + run.bytes <= from + window && run.bytes > 0);
                            let src = &files[overlap.file as usize][run.src as usize..][..run.bytes as usize];
                            got[run.dst as usize..][..run.bytes as usize].copy_from_slice(src);
                            of_this += run.bytes;
                        }
                    }
                    prop_assert_eq!(of_this, overlap.bytes());
                    filled += of_this;
                }
                prop_assert_eq!(filled, expected.len() as u64, "each byte once");
                prop_assert_eq!(got, expected);
            }
        }
    }

    #[test]
    fn rows_are_one_run_and_columns_are_many() {
        let shape = [8, 10];
        let rows = Slice {
            offset: vec![2, 0],
            extent: vec![3, 10],
        };
        let columns = Slice {
            offset: vec![0, 4],
            extent: vec![8, 2],
        };
        let whole = ramp(&shape, 4);
        let (tensor, _) = tensor_of(&shape, crate::Dtype::F32, &[Slice::whole(&shape)], &whole);
        let runs = |wanted: &Slice| {
            overlaps(&tensor, wanted)
                .map(|o| (o.runs(), o.bytes()))
                .collect::<Vec<_>>()
        };
        assert_eq!(runs(&rows), [(1, 120)]);
        assert_eq!(runs(&columns), [(8, 64)]);
    }
}
