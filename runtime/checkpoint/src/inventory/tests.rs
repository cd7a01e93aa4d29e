use super::*;
use crate::Dtype;
use crate::plan::{Held, Plan, Rank};

/// The inventory of a rank that believes that two ranks hold these tensors, by names and lengths.
fn inventory(tensors: &[(&str, u64)]) -> Inventory {
    let held: Vec<Held> = (tensors.iter())
        .map(|(name, len)| Held::whole(name, Dtype::F32, &[*len]))
        .collect();
    let ranks = [0, 1].map(|node| Rank { node, held: &held });
    Plan::new(&ranks).unwrap().inventory().clone()
}

fn differ(of: &[&Inventory], sampled: &[&str]) -> Difference {
    let of: Vec<Option<&Inventory>> = of.iter().map(|of| Some(*of)).collect();
    *compare(&of, sampled).unwrap_err()
}

fn alone(name: &str) -> Option<(String, String)> {
    Some((name.to_owned(), name.to_owned()))
}

#[test]
fn ranks_that_hold_the_same_agree() {
    let one = inventory(&[("a", 3), ("b", 4)]);
    assert_eq!(compare(&[Some(&one), Some(&one.clone())], &[]), Ok(()));
    // Of an older release.
    assert_eq!(compare(&[Some(&one), None], &[]), Ok(()));
}

#[test]
fn the_first_tensor_that_differs_is_named() {
    let common = [("a", 3), ("b", 4)];
    let with = |more: &[(&'static str, u64)]| inventory(&[&common, more].concat());
    let cases = [
        (with(&[("c", 1)]), with(&[("c", 2)]), "c"),
        (with(&[("c", 1)]), with(&[("d", 1)]), "c"),
        (with(&[("d", 1)]), with(&[("c", 1)]), "c"),
        (with(&[]), with(&[("c", 1)]), "c"),
        (with(&[("c", 1), ("d", 1)]), with(&[("d", 1)]), "c"),
        (inventory(&[]), with(&[]), "a"),
    ];
    for (a, b, name) in &cases {
        let found = differ(&[a, b, a], &[]);
        assert_eq!(found.what, What::Tensors);
        assert_eq!(found.ranks, [vec![0, 2], vec![1]]);
        assert_eq!(found.between, alone(name));
    }
}

#[test]
fn of_many_tensors_a_run_is_named() {
    let names: Vec<String> = (0..1000).map(|at| format!("t{at:04}")).collect();
    let all: Vec<(&str, u64)> = names.iter().map(|name| (name.as_str(), 8)).collect();
    let whole = inventory(&all);
    assert!(whole.runs.len() <= MAX_RUNS);
    let mut other = all.clone();
    other[500].1 = 9;
    let (first, last) = differ(&[&whole, &inventory(&other)], &[]).between.unwrap();
    assert!(*first <= *"t0500" && *"t0500" <= *last, "{first} {last}");
    assert_eq!((&*first, &*last), ("t0480", "t0512"));
    // One has so many more that its runs are longer.
    for fewer in [1, 400, 600] {
        let (first, last) = differ(&[&whole, &inventory(&all[fewer..])], &[])
            .between
            .unwrap();
        assert!(
            *first == *"t0000" && *last > *first,
            "{fewer}: {first} {last}"
        );
        let found = differ(&[&whole, &inventory(&all[..1000 - fewer])], &[]);
        let (first, last) = found.between.unwrap();
        let missing = &names[1000 - fewer];
        assert!(
            first <= *missing && *missing <= last,
            "{fewer}: {first} {last}"
        );
    }
}

#[test]
fn ranks_that_spread_the_same_otherwise_differ() {
    let held = [Held::whole("a", Dtype::F32, &[3])];
    let on = |nodes: [u32; 2]| {
        let ranks = nodes.map(|node| Rank { node, held: &held });
        Plan::new(&ranks).unwrap().inventory().clone()
    };
    assert_eq!(differ(&[&on([0, 1]), &on([0, 0])], &[]).between, None);
    // Another set of holders is another tensor to hold.
    let ranks = [&held[..], &[]].map(|held| Rank { node: 0, held });
    let mine = Plan::new(&ranks).unwrap().inventory().clone();
    assert_eq!(differ(&[&on([0, 0]), &mine], &[]).between, alone("a"));
}

#[test]
fn values_that_differ_are_named_and_what_nobody_looked_at_is_not() {
    let with = |samples: &[Option<&[u8]>]| Inventory {
        samples: samples.iter().map(|of| of.map(sample)).collect(),
        ..inventory(&[("a", 3), ("b", 4)])
    };
    let names = ["a", "b"];
    let one = with(&[Some(b"1"), Some(b"2")]);
    let some = with(&[None, Some(b"2")]);
    assert_eq!(
        compare(&[Some(&one), Some(&some), Some(&with(&[]))], &names),
        Ok(())
    );
    let found = differ(&[&one, &some, &with(&[Some(b"1"), Some(b"3")])], &names);
    assert_eq!((found.what, found.between), (What::Values, alone("b")));
    assert_eq!(found.ranks, [vec![0, 1], vec![2]]);
    // The beginning alone counts.
    let long = [vec![1; SAMPLE], vec![2]].concat();
    assert_eq!(sample(&long), sample(&long[..SAMPLE]));
}

#[test]
fn what_is_said_fits_into_a_reason() {
    let found = Difference {
        what: What::Values,
        ranks: (0..40)
            .map(|at| (at * 100..at * 100 + 100).collect())
            .take(NAMED)
            .collect(),
        between: Some(("x".repeat(200), "y".repeat(200))),
    };
    assert!(found.to_string().len() < 1024);
}
