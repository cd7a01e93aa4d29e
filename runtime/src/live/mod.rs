//! Live membership: a worker that stays in its process while nodes come and go.

mod seat;

pub use seat::{Seat, Watch};
