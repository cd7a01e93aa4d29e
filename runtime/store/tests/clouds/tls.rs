//! TLS, and proxies.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

use muster_store::{Created, Kind, Store};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{ServerConfig, ServerConnection, StreamOwned};

use crate::bed::{bounded, hasty, options};
use crate::fake::{BUCKET, Fake, Faults};
use crate::http::Request;

/// A fake that speaks TLS as `localhost`, and the certificate that a client must trust.
fn start(fake: Arc<Fake>) -> (u16, String) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(made.key_pair.serialize_der()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    let config = Arc::new(config);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let (config, fake) = (Arc::clone(&config), Arc::clone(&fake));
            // An error is the client going away.
            thread::spawn(move || serve(stream, config, &fake));
        }
    });
    (port, made.cert.pem())
}

fn serve(stream: TcpStream, config: Arc<ServerConfig>, fake: &Fake) -> std::io::Result<()> {
    let connection = ServerConnection::new(config).map_err(std::io::Error::other)?;
    let mut stream = BufReader::new(StreamOwned::new(connection, stream));
    while let Some(request) = Request::read(&mut stream)? {
        let answer = fake.answer(&request);
        let mut all = answer.head();
        all.extend(&answer.body);
        stream.get_mut().write_all(&all)?;
    }
    Ok(())
}

/// A proxy that connects its clients, and how often it did.
fn start_proxy() -> (u16, Arc<std::sync::atomic::AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let count = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let counted = Arc::clone(&counted);
            thread::spawn(move || tunnel(stream, &counted));
        }
    });
    (port, count)
}

fn tunnel(stream: TcpStream, count: &std::sync::atomic::AtomicUsize) -> std::io::Result<()> {
    let mut from = BufReader::new(stream.try_clone()?);
    let mut first = String::new();
    from.read_line(&mut first)?;
    let mut line = String::new();
    while line.trim_end() != "" || line.is_empty() {
        line.clear();
        from.read_line(&mut line)?;
    }
    let to = first
        .strip_prefix("CONNECT ")
        .and_then(|rest| rest.split(' ').next());
    let server = TcpStream::connect(to.unwrap())?;
    count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let mut stream = stream;
    stream.write_all(b"HTTP/1.1 200 Connected\r\n\r\n")?;
    let (mut up, mut down) = (server.try_clone()?, stream.try_clone()?);
    thread::spawn(move || std::io::copy(&mut &server, &mut down));
    std::io::copy(&mut from, &mut up)?;
    Ok(())
}

fn store(port: u16, more: &[(&str, &str)]) -> Result<Store, muster_store::StoreError> {
    let mut options = options(0, hasty());
    let endpoint = format!("https://localhost:{port}");
    let mut variables = vec![
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "b"),
        ("AWS_ENDPOINT_URL", &endpoint),
    ];
    variables.extend(more);
    options.variables = variables.into_iter().collect();
    Store::open(&format!("s3://{BUCKET}/team").parse().unwrap(), &options)
}

#[test]
fn a_trusted_server_is_spoken_with_and_no_other() {
    let fake = Arc::new(Fake::new(Faults::default()));
    let (port, certificate) = start(Arc::clone(&fake));
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("authority.pem");
    std::fs::write(&file, certificate).unwrap();
    let trusting = ("SSL_CERT_FILE", file.to_str().unwrap());

    let trusted = store(port, &[trusting]).unwrap();
    assert_eq!(trusted.create("a", b"x").unwrap(), Created::Created);
    assert_eq!(trusted.get("a", 9).unwrap(), b"x");

    // Another server's certificate.
    let (other, _) = start(Arc::clone(&fake));
    let error = bounded(|| store(other, &[trusting]).unwrap().create("b", b"x")).unwrap_err();
    assert_eq!((error.kind, error.unknown), (Kind::Setup, false), "{error}");
    assert!(error.to_string().contains("SSL_CERT_FILE"), "{error}");
    assert_eq!(error.tries, 1);

    let nowhere = place.path().join("none.pem");
    let error = store(port, &[("SSL_CERT_FILE", nowhere.to_str().unwrap())]).unwrap_err();
    assert_eq!(error.kind, Kind::Setup);
    assert!(error.to_string().contains("ca-certificates"), "{error}");
}

#[test]
fn a_proxy_is_used_where_the_environment_says_so() {
    let fake = Arc::new(Fake::new(Faults::default()));
    let (port, certificate) = start(fake);
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("authority.pem");
    std::fs::write(&file, certificate).unwrap();
    let trusting = ("SSL_CERT_FILE", file.to_str().unwrap());
    let (proxy, count) = start_proxy();
    let proxy = format!("http://127.0.0.1:{proxy}");
    let used = || count.load(std::sync::atomic::Ordering::Relaxed);
    for (variables, through) in [
        (vec![trusting, ("HTTPS_PROXY", &*proxy)], true),
        (vec![trusting, ("https_proxy", &*proxy)], true),
        (
            vec![
                trusting,
                ("HTTPS_PROXY", &*proxy),
                ("NO_PROXY", "localhost"),
            ],
            false,
        ),
    ] {
        let before = used();
        let store = store(port, &variables).unwrap();
        store.put("a", b"x").unwrap();
        assert_eq!(used() > before, through, "{variables:?}");
    }
}
