//! HTTP for object_store: hyper with rustls and the system's certificates, proxies from the
//! environment, limits on time and size, and notes of what was seen ([`Trace`]).
//!
//! Not reqwest: besides being smaller, this knows of each request whether it went out, which a
//! create that may not be repeated blindly depends on.

use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use futures::future::BoxFuture;
use http::Uri;
use http_body::{Body, Frame, SizeHint};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector as Tcp;
use hyper_util::client::legacy::connect::proxy::Tunnel;
use hyper_util::client::legacy::{Client, Error as ClientError};
use hyper_util::client::proxy::matcher::Matcher;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpResponseBody, HttpService,
};
use object_store::{ClientConfigKey, ClientOptions};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};
use tower_service::Service;

use super::wire::{Answer, Fault, Trace};
use crate::options::{Patience, Variables};

/// The most bytes of an error's body that are read.
const MAX_ERROR: u64 = 64 << 10;
/// Where nodes get credentials from: never by proxy, and on a node that has none the address does
/// not answer at all.
const METADATA: [&str; 5] = [
    "169.254.169.254",
    "169.254.170.2",
    "169.254.170.23",
    "[fd00:ec2::23]",
    "metadata.google.internal",
];
const METADATA_CONNECT: Duration = Duration::from_secs(1);

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Makes clients for object_store that share connections.
#[derive(Clone, Debug)]
pub(crate) struct Connector {
    client: Client<HttpsConnector<Dial>, Watched>,
    idle: Duration,
    /// Hosts of the store itself; others are asked for credentials.
    hosts: Arc<[String]>,
}

impl Connector {
    /// # Errors
    /// There are no certificates to trust.
    pub(crate) fn new(
        variables: &Variables,
        patience: Patience,
        hosts: Vec<String>,
        tls_wanted: bool,
    ) -> Result<Self, String> {
        let tls = hyper_rustls::HttpsConnectorBuilder::new();
        let tls: HttpsConnectorBuilder<_> = tls.with_tls_config(tls_config(variables, tls_wanted)?);
        let mut client = Client::builder(TokioExecutor::new());
        client
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(Duration::from_secs(20))
            .pool_max_idle_per_host(32);
        let dial = Dial::new(variables, patience.connect);
        let https = tls.https_or_http().enable_http1().wrap_connector(dial);
        Ok(Self {
            client: client.build(https),
            idle: patience.idle,
            hosts: hosts.into(),
        })
    }
}

fn tls_config(variables: &Variables, wanted: bool) -> Result<rustls::ClientConfig, String> {
    let mut roots = rustls::RootCertStore::empty();
    if wanted {
        let (file, dir) = (
            variables.get("SSL_CERT_FILE"),
            variables.get("SSL_CERT_DIR"),
        );
        let found = match (file, dir) {
            (None, None) => rustls_native_certs::load_native_certs(),
            (file, dir) => {
                rustls_native_certs::load_certs_from_paths(file.map(Path::new), dir.map(Path::new))
            }
        };
        let (good, _) = roots.add_parsable_certificates(found.certs);
        if good == 0 {
            let why = found.errors.first().map(|error| format!(" ({error})"));
            return Err(format!(
                "this system has no certificates to trust{}: install ca-certificates, or set SSL_CERT_FILE",
                why.unwrap_or_default()
            ));
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let allow = options.get_config_value(&ClientConfigKey::AllowHttp);
        Ok(HttpClient::new(Transport {
            connector: self.clone(),
            plain: allow.as_deref() == Some("true"),
        }))
    }
}

#[derive(Debug)]
struct Transport {
    connector: Connector,
    /// Whether plain HTTP may be spoken.
    plain: bool,
}

#[async_trait]
impl HttpService for Transport {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let trace = Trace::current();
        let head_only = request.method() == http::Method::HEAD;
        let host = request.uri().host().unwrap_or_default();
        let for_credentials = !self.connector.hosts.iter().any(|known| known == host);
        if request.uri().scheme_str() != Some("https") && !self.plain {
            return Err(failed(&trace, Fault::Plain));
        }
        trace.note(|seen| {
            seen.for_credentials = for_credentials;
            seen.sent |= !for_credentials;
        });
        let activity = Arc::new(Activity::new());
        let request = request.map(|body| Watched {
            body,
            activity: Arc::clone(&activity),
        });
        let idle = self.connector.idle;
        let response = tokio::select! {
            response = self.connector.client.request(request) => response,
            () = activity.idle_for(idle) => return Err(failed(&trace, Fault::Idle)),
        };
        let response = match response {
            Ok(response) => response,
            Err(error) => {
                let fault = fault_of(&error);
                if matches!(fault, Fault::Connect(_) | Fault::Tls(_)) && !for_credentials {
                    trace.note(|seen| seen.sent = false);
                }
                return Err(failed(&trace, fault));
            }
        };
        let mut answer = Answer::of_head(&response);
        let (parts, body) = response.into_parts();
        let limit = match answer.is_success() {
            true => trace.limit,
            false => MAX_ERROR,
        };
        let body = Guarded {
            body: Box::pin(body),
            idle,
            sleep: Box::pin(tokio::time::sleep(idle)),
            left: limit,
            trace: trace.clone(),
        };
        if answer.is_success() || answer.status == 304 {
            // object_store reserves what is announced.
            if !head_only && answer.length.is_some_and(|length| length > limit) {
                return Err(failed(&trace, Fault::TooLarge));
            }
            trace.note(|seen| seen.answer = Some(answer));
            return Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(body)));
        }
        // Errors are short; one whose body cannot be had is told by its status.
        let body = HttpResponseBody::new(body)
            .bytes()
            .await
            .unwrap_or_default();
        answer.read_error(&body);
        trace.note(|seen| {
            seen.fault = None;
            seen.answer = Some(answer);
        });
        Ok(HttpResponse::from_parts(parts, body.into()))
    }
}

fn failed(trace: &Trace, fault: Fault) -> HttpError {
    let (kind, said) = match &fault {
        Fault::Plain => (HttpErrorKind::Connect, "plain HTTP".to_owned()),
        Fault::Connect(said) | Fault::Tls(said) => (HttpErrorKind::Connect, said.clone()),
        Fault::Idle => (HttpErrorKind::Timeout, "no answer".to_owned()),
        Fault::Broken(said) => (HttpErrorKind::Interrupted, said.clone()),
        Fault::TooLarge => (HttpErrorKind::Decode, "too large".to_owned()),
    };
    trace.note(|seen| {
        seen.answer = None;
        seen.fault = Some(fault);
    });
    HttpError::new_boxed(kind, said.into())
}

fn fault_of(error: &ClientError) -> Fault {
    let mut said = Vec::new();
    let mut source: Option<&dyn std::error::Error> = Some(error);
    let mut tls = false;
    while let Some(error) = source {
        tls |= is_of_tls(error);
        said.push(error.to_string());
        source = error.source();
    }
    said.dedup();
    // The first only says that it is an error of the client.
    let said = said
        .get(1..)
        .filter(|rest| !rest.is_empty())
        .unwrap_or(&said)
        .join(": ");
    let said: String = said.chars().take(300).collect();
    match (error.is_connect(), tls) {
        (true, true) => Fault::Tls(said),
        (true, false) => Fault::Connect(said),
        (false, _) => Fault::Broken(said),
    }
}

/// An io::Error hides what it wraps, which may be another one.
fn is_of_tls(error: &(dyn std::error::Error + 'static)) -> bool {
    let inner = error.downcast_ref::<std::io::Error>();
    error.is::<rustls::Error>()
        || inner
            .and_then(|error| error.get_ref())
            .is_some_and(|inner| is_of_tls(inner))
}

/// When bytes last went out.
#[derive(Debug)]
struct Activity {
    began: Instant,
    /// Milliseconds after that.
    last: AtomicU64,
}

impl Activity {
    fn new() -> Self {
        Self {
            began: Instant::now(),
            last: AtomicU64::new(0),
        }
    }

    fn note(&self) {
        let passed = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last.store(passed, Ordering::Relaxed);
    }

    /// Ends once nothing was noted for so long.
    async fn idle_for(&self, limit: Duration) {
        loop {
            let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
            let until = self.began + last + limit;
            if Instant::now() >= until {
                return;
            }
            tokio::time::sleep_until(until).await;
        }
    }
}

/// A request's body; that a piece of it is asked for is a sign of life.
#[derive(Debug)]
pub(crate) struct Watched {
    body: HttpRequestBody,
    activity: Arc<Activity>,
}

impl Body for Watched {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        self.activity.note();
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An answer's body, with its limits.
struct Guarded {
    body: Pin<Box<hyper::body::Incoming>>,
    idle: Duration,
    sleep: Pin<Box<Sleep>>,
    left: u64,
    trace: Trace,
}

impl Body for Guarded {
    type Data = Bytes;
    type Error = HttpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, HttpError>>> {
        let this = &mut *self;
        match this.body.as_mut().poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                let until = Instant::now() + this.idle;
                this.sleep.as_mut().reset(until);
                let bytes = frame.data_ref().map_or(0, |data| data.len() as u64);
                match this.left.checked_sub(bytes) {
                    Some(left) => {
                        this.left = left;
                        Poll::Ready(Some(Ok(frame)))
                    }
                    None => Poll::Ready(Some(Err(failed(&this.trace, Fault::TooLarge)))),
                }
            }
            Poll::Ready(Some(Err(error))) => {
                let fault = Fault::Broken(format!("the answer ended early: {error}"));
                Poll::Ready(Some(Err(failed(&this.trace, fault))))
            }
            Poll::Ready(None) => Poll::Ready(None),
            Poll::Pending => match this.sleep.as_mut().poll(cx) {
                Poll::Ready(()) => Poll::Ready(Some(Err(failed(&this.trace, Fault::Idle)))),
                Poll::Pending => Poll::Pending,
            },
        }
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Connects, through a proxy where the environment says so.
#[derive(Clone, Debug)]
pub(crate) struct Dial {
    tcp: Tcp,
    metadata: Tcp,
    proxies: Arc<Matcher>,
}

impl Dial {
    fn new(variables: &Variables, connect: Duration) -> Self {
        let tcp = |limit| {
            let mut tcp = Tcp::new();
            tcp.enforce_http(false);
            tcp.set_nodelay(true);
            tcp.set_keepalive(Some(Duration::from_secs(30)));
            tcp.set_connect_timeout(Some(limit));
            tcp
        };
        let of = |name: &str| {
            let either = variables.get(name).or(variables.get(&name.to_lowercase()));
            either.unwrap_or_default().to_owned()
        };
        let proxies = Matcher::builder()
            .https(of("HTTPS_PROXY"))
            .all(of("ALL_PROXY"))
            .no(of("NO_PROXY"))
            .build();
        Self {
            tcp: tcp(connect),
            metadata: tcp(connect.min(METADATA_CONNECT)),
            proxies: Arc::new(proxies),
        }
    }
}

impl Service<Uri> for Dial {
    type Response = TokioIo<TcpStream>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Self::Response, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.tcp.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        if METADATA.contains(&uri.host().unwrap_or_default()) {
            let connecting = self.metadata.call(uri);
            return Box::pin(async move { connecting.await.map_err(Into::into) });
        }
        // Only TLS goes through a proxy: plain HTTP is for this machine, or a network of one's own.
        let proxy = match uri.scheme_str() {
            Some("https") => self.proxies.intercept(&uri),
            _ => None,
        };
        let Some(proxy) = proxy else {
            let connecting = self.tcp.call(uri);
            return Box::pin(async move { connecting.await.map_err(Into::into) });
        };
        let mut tunnel = Tunnel::new(proxy.uri().clone(), self.tcp.clone());
        if let Some(auth) = proxy.basic_auth() {
            tunnel = tunnel.with_auth(auth.clone());
        }
        let tunneling = tunnel.call(uri);
        Box::pin(async move {
            tunneling
                .await
                .map_err(|e| format!("the proxy: {e}").into())
        })
    }
}
