//! Every operation against a plain reference.

use std::ffi::c_void;
use std::time::Duration;

use half::{bf16, f16};
use libloading::os::unix::Symbol;
use muster_runtime::collective::nccl::{Communicator, Elements};
use muster_runtime::collective::{Element, Layout, Op};

use super::support::*;

const OPS: [Op; 4] = [Op::Sum, Op::Mean, Op::Min, Op::Max];

fn bits<T: Element>(values: &[T]) -> &[u8] {
    bytemuck::cast_slice(values)
}

/// All operations on `len` elements of a type for each rank.
fn check<T: Element>(nccl: &mut Communicator, len: usize, of: fn(f64) -> T) {
    let (rank, world) = (nccl.rank(), nccl.world());
    let whole = len * world as usize;
    let inputs: Vec<Vec<T>> = (0..world).map(|rank| input(rank, whole, of)).collect();
    let slices: Vec<&[T]> = inputs.iter().map(Vec::as_slice).collect();
    let own = &inputs[rank as usize];
    let layout = Layout::new(vec![(0..world).collect()]).unwrap();
    let device = nccl.device().clone();
    let (from, to) = buffers(&device, own, whole);
    let (short, part) = buffers(&device, &own[..len], len);
    // SAFETY: all four outlive the operations, which are waited for here.
    let [input_there, output_there, short_there, part_there] =
        [&from, &to, &short, &part].map(|memory| unsafe { memory.elements(T::DTYPE) });
    let what = |name: &str| format!("{name} of {len} {:?}, world {world}", T::DTYPE);
    let mine = rank as usize * len..(rank as usize + 1) * len;
    for op in OPS {
        let expected = layout.reduce(op, &slices).unwrap();
        let ticket = nccl
            .all_reduce(op, input_there, output_there, AFTER)
            .unwrap();
        nccl.wait(ticket).unwrap();
        let got = read::<T>(&to, whole);
        assert!(
            bits(&got) == bits(&expected),
            "{} {op:?}",
            what("all-reduce")
        );
        nccl.reduce_scatter(op, input_there, part_there, AFTER)
            .unwrap();
        nccl.wait_all().unwrap();
        let got = read::<T>(&part, len);
        let expected = &expected[mine.clone()];
        assert!(
            bits(&got) == bits(expected),
            "{} {op:?}",
            what("reduce-scatter")
        );
    }
    nccl.all_gather(short_there, output_there, AFTER).unwrap();
    nccl.wait_all().unwrap();
    let expected: Vec<T> = inputs
        .iter()
        .flat_map(|input| &input[..len])
        .copied()
        .collect();
    assert!(
        bits(&read::<T>(&to, whole)) == bits(&expected),
        "{}",
        what("all-gather")
    );
    for root in 0..world {
        nccl.broadcast(root, input_there, output_there, AFTER)
            .unwrap();
        nccl.wait_all().unwrap();
        let got = read::<T>(&to, whole);
        assert!(
            bits(&got) == bits(&inputs[root as usize]),
            "{}",
            what("broadcast")
        );
    }
    nccl.all_to_all(input_there, output_there, AFTER).unwrap();
    nccl.wait_all().unwrap();
    let parts = inputs.iter().flat_map(|input| &input[mine.clone()]);
    let expected: Vec<T> = parts.copied().collect();
    assert!(
        bits(&read::<T>(&to, whole)) == bits(&expected),
        "{}",
        what("all-to-all")
    );
    nccl.barrier(AFTER).unwrap();
    nccl.wait_all().unwrap();
    assert!(
        bits(&read::<T>(&from, whole)) == bits(own),
        "an input was written"
    );
}

#[test]
fn every_operation_gives_what_it_must() {
    for world in 1..=4 {
        on_ranks(
            world,
            "",
            |config| config,
            |mut rank| {
                let mut nccl = rank.form();
                for len in [0, 1, 3, 257] {
                    check::<f32>(&mut nccl, len, |x| x as f32);
                    check::<f64>(&mut nccl, len, |x| x);
                    check::<f16>(&mut nccl, len, f16::from_f64);
                    check::<bf16>(&mut nccl, len, bf16::from_f64);
                    check::<i8>(&mut nccl, len, |x| x as i8 - 7);
                    check::<i32>(&mut nccl, len, |x| x as i32 - 7);
                    check::<i64>(&mut nccl, len, |x| (x as i64 - 7) << 58);
                    check::<u8>(&mut nccl, len, |x| (x * 9.0) as u8);
                    check::<u32>(&mut nccl, len, |x| (x as u32) << 28);
                    check::<u64>(&mut nccl, len, |x| (x as u64) << 60);
                }
                nccl.close(&mut rank.group).unwrap();
            },
        );
    }
}

#[test]
fn many_operations_follow_each_other_without_waiting() {
    // More than are let into the stream at once.
    const MANY: usize = 600;
    on_ranks(
        3,
        "slow:1:5:30",
        |config| config,
        |mut rank| {
            let mut nccl = rank.form();
            let device = nccl.device().clone();
            let own = f64::from(rank.number() + 1);
            let memories: Vec<_> = (0..MANY)
                .map(|i| buffers(&device, &[own, i as f64], 2))
                .collect();
            let tickets: Vec<_> = memories
                .iter()
                .map(|(from, to)| {
                    // SAFETY: both outlive the operations, which are waited for here.
                    let (from, to) =
                        unsafe { (from.elements(f64::DTYPE), to.elements(f64::DTYPE)) };
                    nccl.all_reduce(Op::Sum, from, to, AFTER).unwrap()
                })
                .collect();
            nccl.wait(tickets[7]).unwrap();
            assert_eq!(read::<f64>(&memories[7].1, 2), [6.0, 21.0]);
            nccl.wait_all().unwrap();
            for (i, (_, to)) in memories.iter().enumerate() {
                assert_eq!(read::<f64>(to, 2), [6.0, 3.0 * i as f64]);
            }
            nccl.close(&mut rank.group).unwrap();
        },
    );
}

/// Writes a number, late: what a kernel in the caller's stream does.
unsafe extern "C" fn write_late(to: *mut c_void) {
    std::thread::sleep(Duration::from_millis(50));
    // SAFETY: the test gives it the address of a float in memory that lives on.
    unsafe { to.cast::<f32>().write(5.0) };
}

/// Doubles a number: what the next kernel in the caller's stream does.
unsafe extern "C" fn double(at: *mut c_void) {
    // SAFETY: as above.
    unsafe { *at.cast::<f32>() *= 2.0 };
}

#[test]
fn streams_of_the_caller_are_waited_for_and_wait() {
    type Work = unsafe extern "C" fn(*mut c_void);
    on_ranks(
        2,
        "",
        |config| config,
        |mut rank| {
            let enqueue: Symbol<unsafe extern "C" fn(*mut c_void, Work, *mut c_void)> =
                own("standin_enqueue");
            let mut nccl = rank.form();
            let device = nccl.device().clone();
            let stream = device.stream().unwrap();
            let (mut from, mut to) = ([1f32], [0f32]);
            let address = |at: &mut [f32; 1]| at.as_mut_ptr().expose_provenance();
            let (from_at, to_at) = (address(&mut from), address(&mut to));
            // SAFETY: the stand-in's devices have the memory of the process.
            let (input, output) = unsafe {
                (
                    Elements::new(from_at as u64, 1, f32::DTYPE),
                    Elements::new(to_at as u64, 1, f32::DTYPE),
                )
            };
            let raw = {
                // A handle is a pointer, and the stand-in wants it back.
                let text = format!("{:?}", stream.raw());
                let hex = text
                    .trim_start_matches("RawStream(0x")
                    .trim_end_matches(')');
                usize::from_str_radix(hex, 16).unwrap()
            };
            let at = std::ptr::with_exposed_provenance_mut::<c_void>;
            // SAFETY: the stream and both numbers outlive what is in the stream.
            unsafe { enqueue(at(raw), write_late, at(from_at)) };
            let ticket = nccl
                .all_reduce(Op::Sum, input, output, stream.raw())
                .unwrap();
            nccl.join(ticket, stream.raw()).unwrap();
            // SAFETY: as above.
            unsafe { enqueue(at(raw), double, at(to_at)) };
            // After everything: a barrier waits for the caller's stream.
            nccl.barrier(stream.raw()).unwrap();
            nccl.wait_all().unwrap();
            // SAFETY: nothing writes it any more.
            let got = unsafe { at(to_at).cast::<f32>().read() };
            assert_eq!(got, 20.0, "twice the sum of what was written late");
            nccl.close(&mut rank.group).unwrap();
        },
    );
}

#[test]
fn nothing_is_left_behind_by_many_communicators() {
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let threads = || std::fs::read_dir("/proc/self/task").unwrap().count();
    let once = |times: usize| {
        on_ranks(
            2,
            "",
            |config| config,
            |mut rank| {
                for i in 0..times {
                    let mut nccl = rank.form();
                    let (from, to) = buffers(nccl.device(), &[1f32], 1);
                    // SAFETY: both outlive the communicator.
                    let (from, to) =
                        unsafe { (from.elements(f32::DTYPE), to.elements(f32::DTYPE)) };
                    let ticket = nccl.all_reduce(Op::Sum, from, to, AFTER).unwrap();
                    nccl.wait(ticket).unwrap();
                    if i % 2 == 0 {
                        nccl.close(&mut rank.group).unwrap();
                    } else {
                        // As abrupt, but nothing is on its way: the other side has to know that too.
                        rank.group.barrier().unwrap();
                        drop(nccl);
                    }
                }
            },
        );
    };
    once(2);
    let settled = |expected: Option<(usize, usize, [i32; 5])>| {
        // Streams of the stand-in end on their own.
        let until = std::time::Instant::now() + BOUND;
        loop {
            let now = (open(), threads(), live());
            let quiet = now.2 == [0; 5];
            if (quiet && expected.is_none_or(|e| e == now)) || std::time::Instant::now() > until {
                return now;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    // Other tests of this process come and go meanwhile, if they are run in one.
    if std::env::var_os("NEXTEST").is_some() {
        let before = settled(None);
        once(50);
        assert_eq!(settled(Some(before)), before);
        assert_eq!(before.2, [0; 5]);
    }
}
