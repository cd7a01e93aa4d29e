//! Places where checkpoints and a job's log live: directories, S3, Google Cloud Storage, Azure.
//!
//! One interface, [`Store`], for everything that Muster does with such a place. Calls block, and
//! may come from several threads; an asynchronous caller makes them on a thread that may block.
//!
//! - [`Store::create`] is the decision: of any number of creators of one name exactly one wins, and
//!   nothing is ever overwritten. Its outcome is success, somebody else's success, a failure that
//!   changed nothing, or an error that says that it is unknown ([`StoreError::unknown`]).
//! - [`Store::upload`] stores data files of any size in bounded memory. An object is visible whole
//!   or not at all, but an upload is **not** create-only in the cloud: the last of two to one name
//!   wins. Data files therefore have names that no two attempts share.
//! - [`Store::probe`] refuses a store that does not keep these promises.
//!
//! Bytes go in and come out: this crate knows nothing of records, jobs or agents. It never
//! overwrites but by [`Store::put`], opens nothing but what its location names, and no answer of a
//! store makes it panic or allocate more than its caller allowed.

#[cfg(feature = "cloud")]
mod cloud;
mod directory;
mod error;
mod location;
mod name;
mod options;
mod place;
mod probe;
#[cfg(feature = "cloud")]
mod profile;
mod shelf;
mod store;

pub use error::{Flavour, Kind, StoreError};
pub use location::{Location, LocationError};
pub use options::{Options, Patience, Variables};
pub use probe::{PROBE_FOLDER, Probed, UUID_NAME, Uuid};
pub use store::{Checksum, Created, Entry, Head, Progress, Store, Uploaded, Verified};
