//! Azurite, Azure Blob Storage's emulator, with the container `box`: `MUSTER_TEST_AZURITE` names its program.

use super::server::{Running, ports};

/// The emulator's account, which is public.
pub(crate) const ACCOUNT: &str = "devstoreaccount1";
pub(crate) const KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";

pub(crate) fn start() -> (Running, u16) {
    let [port] = ports();
    let mut server = Running::start("MUSTER_TEST_AZURITE", |_, command| {
        command
            .args(["--blobHost", "127.0.0.1", "--blobPort"])
            .arg(port.to_string())
            .args(["--location", "data", "--skipApiVersionCheck"])
            .args(["--disableTelemetry", "--silent"])
            .env("AZURITE_ACCOUNTS", format!("{ACCOUNT}:{KEY}"));
    });
    server.until(|| match make_container(port) {
        Ok(201 | 409) => Ok(()),
        Ok(status) => Err(format!("HTTP {status}")),
        Err(error) => Err(error.to_string()),
    });
    (server, port)
}

/// Muster makes no containers.
fn make_container(port: u16) -> std::io::Result<u16> {
    let status = std::process::Command::new("python3")
        .args(["-c", MAKE, &port.to_string(), ACCOUNT, KEY])
        .output()?;
    let said = String::from_utf8_lossy(&status.stdout);
    let failed = || std::io::Error::other(String::from_utf8_lossy(&status.stderr).into_owned());
    said.trim().parse().map_err(|_| failed())
}

/// Create Container, signed with the account's key (Shared Key, version 2021-08-06).
const MAKE: &str = r#"
import base64, email.utils, hashlib, hmac, http.client, sys
port, account, key = sys.argv[1:]
date = email.utils.formatdate(usegmt=True)
headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
canonical = "".join(f"{name}:{value}\n" for name, value in sorted(headers.items()))
text = "PUT" + "\n" * 12 + canonical + f"/{account}/{account}/box\nrestype:container"
mac = hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()
headers["Authorization"] = f"SharedKey {account}:" + base64.b64encode(mac).decode()
connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=10)
connection.request("PUT", f"/{account}/box?restype=container", headers=headers)
print(connection.getresponse().status)
"#;

/// Variables that reach it on this port.
pub(crate) fn variables(port: u16, key: &str) -> [(&'static str, String); 3] {
    [
        ("AZURE_STORAGE_ACCOUNT", ACCOUNT.to_owned()),
        ("AZURE_STORAGE_KEY", key.to_owned()),
        (
            "AZURE_STORAGE_ENDPOINT",
            format!("http://127.0.0.1:{port}/{ACCOUNT}"),
        ),
    ]
}
