//! Nodes on hosts of their own: n1 to n3.

mod cuts;
mod discovery;
mod needs_torch;
mod replaced;

/// The hosts, without one of them.
fn without(of: usize) -> Vec<usize> {
    (1..4).filter(|n| *n != of).collect()
}
