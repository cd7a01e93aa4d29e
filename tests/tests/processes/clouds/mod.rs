//! Servers for stores, and a proxy that injects faults: those of muster-store's own tests.

#[path = "../../../../runtime/store/tests/clouds/azurite.rs"]
pub(crate) mod azurite;
#[path = "../../../../runtime/store/tests/clouds/fake.rs"]
pub(crate) mod fake;
#[path = "../../../../runtime/store/tests/clouds/http.rs"]
pub(crate) mod http;
#[path = "../../../../runtime/store/tests/clouds/proxy.rs"]
#[expect(dead_code, reason = "muster-store's tests use all of it")]
pub(crate) mod proxy;
#[path = "../../../../runtime/store/tests/clouds/server.rs"]
pub(crate) mod server;

use muster_store::{Options, Store, Variables};

use crate::harness::Bed;

/// Variables that reach a server on this port, whatever it speaks.
fn variables(port: u16) -> Vec<(&'static str, String)> {
    let aws = [
        ("AWS_ACCESS_KEY_ID", "test".into()),
        ("AWS_SECRET_ACCESS_KEY", "testsecret".into()),
        ("AWS_REGION", "us-east-1".into()),
        ("AWS_ENDPOINT_URL", format!("http://127.0.0.1:{port}")),
    ];
    let azure = azurite::variables(port, azurite::KEY);
    aws.into_iter().chain(azure).collect()
}

/// Gives the credentials to all that the bed starts from now on.
pub(crate) fn lend(bed: &mut Bed, port: u16) {
    for (name, value) in variables(port) {
        bed.env(name, &value);
    }
}

/// The store, as this process reaches it.
pub(crate) fn open(location: &str, port: u16) -> Store {
    let variables: Variables = variables(port).into_iter().collect();
    Store::open(&location.parse().unwrap(), &Options::new(variables)).unwrap()
}
