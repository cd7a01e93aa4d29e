//! The agent's HTTP port: `/metrics`, `/healthz`, `/readyz`. Read-only; nothing that a client
//! sends is looked at beyond method and path.
//!
//! Limits: [`MAX_CONNECTIONS`] at once (further ones wait in the kernel's backlog), one request
//! per connection, [`MAX_HEAD`] bytes and [`MAX_HEADERS`] header lines, [`CONNECTION_TIMEOUT`] for
//! all of it.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Mutex, Semaphore, watch};

use crate::metrics::{CONTENT_TYPE, Metrics};

pub const MAX_CONNECTIONS: usize = 64;
pub const MAX_HEAD: usize = 16 << 10;
pub const MAX_HEADERS: usize = 64;
pub const HEADER_TIMEOUT: Duration = Duration::from_secs(2);
pub const CONNECTION_TIMEOUT: Duration = Duration::from_secs(10);
/// A loop that has not run for this long is reported as dead.
pub const STALE_AFTER: Duration = Duration::from_secs(10);

/// Touched by the main loop at each turn, and read by `/healthz`. Clones are the same watchdog.
/// A machine that sleeps does not count as a loop that hangs.
#[derive(Debug, Clone)]
pub struct Watchdog {
    start: Instant,
    /// Milliseconds after `start`.
    touched: Arc<AtomicU64>,
    stale_after: Duration,
}

impl Watchdog {
    pub fn new(stale_after: Duration) -> Watchdog {
        Watchdog {
            start: Instant::now(),
            touched: Arc::new(AtomicU64::new(0)),
            stale_after,
        }
    }

    pub fn touch(&self) {
        let now = u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.touched.fetch_max(now, Ordering::Relaxed);
    }

    /// How long the loop has not run, when that is too long.
    pub fn stale(&self) -> Option<Duration> {
        let touched = Duration::from_millis(self.touched.load(Ordering::Relaxed));
        let silent = self.start.elapsed().saturating_sub(touched);
        (silent > self.stale_after).then_some(silent)
    }
}

/// Why the agent is not ready, one line each; empty means ready.
pub type NotReady = Vec<String>;

/// The main loop's side of the probes.
#[derive(Debug)]
pub struct Health {
    pub watchdog: Watchdog,
    /// Not ready ("starting") until the loop says otherwise.
    pub not_ready: watch::Sender<NotReady>,
}

impl Default for Health {
    fn default() -> Health {
        Health {
            watchdog: Watchdog::new(STALE_AFTER),
            not_ready: watch::Sender::new(vec!["starting".to_owned()]),
        }
    }
}

/// Why the port cannot be served.
#[derive(Debug, thiserror::Error)]
#[error("the HTTP port {address} cannot be opened: {source}; choose another --http, or --http off")]
pub struct BindError {
    pub address: SocketAddr,
    pub source: io::Error,
}

/// A bound port, to be served by [`serve`](Self::serve).
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    router: Router,
}

#[derive(Debug, Clone)]
struct Shared {
    metrics: Metrics,
    /// Held by the request that makes the page of metrics.
    turn: Arc<Mutex<()>>,
    watchdog: Watchdog,
    not_ready: watch::Receiver<NotReady>,
}

impl Server {
    pub async fn bind(
        address: SocketAddr,
        metrics: Metrics,
        health: &Health,
    ) -> Result<Server, BindError> {
        let listener = TcpListener::bind(address)
            .await
            .map_err(|source| BindError { address, source })?;
        let router = Router::new()
            .route("/metrics", get(metrics_page))
            .route("/healthz", get(healthz))
            .route("/readyz", get(readyz))
            .with_state(Shared {
                metrics,
                turn: Arc::default(),
                watchdog: health.watchdog.clone(),
                not_ready: health.not_ready.subscribe(),
            });
        Ok(Server { listener, router })
    }

    /// The address that was bound; of use when the port was 0.
    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves for ever. Ends when it is dropped; connections end by themselves soon after.
    pub async fn serve(self) {
        let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            // The semaphore is never closed.
            let Ok(slot) = Arc::clone(&slots).acquire_owned().await else {
                return;
            };
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "an HTTP connection could not be accepted");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let router = self.router.clone();
            tokio::spawn(async move {
                let served = tokio::time::timeout(CONNECTION_TIMEOUT, serve_one(stream, router));
                if let Ok(Err(error)) = served.await {
                    tracing::debug!(%error, "an HTTP connection ended early");
                }
                drop(slot);
            });
        }
    }
}

async fn serve_one(stream: TcpStream, router: Router) -> hyper::Result<()> {
    hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(MAX_HEAD)
        .max_headers(MAX_HEADERS)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router))
        .await
}

/// The page is made beside the agent's loop, which everybody's heartbeats wait for, and one at a time.
async fn metrics_page(State(shared): State<Shared>) -> Response {
    let _turn = shared.turn.lock().await;
    let page = tokio::task::spawn_blocking(move || shared.metrics.render());
    let why = match page.await {
        Ok(Ok(text)) => return ([(header::CONTENT_TYPE, CONTENT_TYPE)], text).into_response(),
        Ok(Err(error)) => error.to_string(),
        Err(error) => error.to_string(),
    };
    (StatusCode::INTERNAL_SERVER_ERROR, format!("{why}\n")).into_response()
}

async fn healthz(State(shared): State<Shared>) -> Response {
    match shared.watchdog.stale() {
        None => "ok\n".into_response(),
        Some(silent) => {
            let text = format!(
                "the agent's loop has not run for {:.1} s (limit {:.1} s)\n",
                silent.as_secs_f64(),
                shared.watchdog.stale_after.as_secs_f64()
            );
            (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
        }
    }
}

async fn readyz(State(shared): State<Shared>) -> Response {
    let reasons = shared.not_ready.borrow().clone();
    if reasons.is_empty() {
        return "ready\n".into_response();
    }
    let text: String = reasons
        .iter()
        .map(|r| format!("not ready: {r}\n"))
        .collect();
    (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const LONG: Duration = Duration::from_secs(30);

    struct Served {
        address: SocketAddr,
        health: Health,
        task: tokio::task::JoinHandle<()>,
    }

    impl Drop for Served {
        fn drop(&mut self) {
            self.task.abort();
        }
    }

    async fn served(stale_after: Duration) -> Served {
        let health = Health {
            watchdog: Watchdog::new(stale_after),
            ..Health::default()
        };
        let metrics = Metrics::new("1.0.0", "abc").unwrap();
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let server = Server::bind(any, metrics, &health).await.unwrap();
        Served {
            address: server.address().unwrap(),
            task: tokio::spawn(server.serve()),
            health,
        }
    }

    /// Sends bytes and returns everything that comes back until the end.
    async fn ask(address: SocketAddr, request: &[u8]) -> String {
        let exchange = async {
            let mut stream = TcpStream::connect(address).await.unwrap();
            // The server may have closed before all is written.
            let _ = stream.write_all(request).await;
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
            String::from_utf8(answer).unwrap()
        };
        tokio::time::timeout(LONG, exchange).await.unwrap()
    }

    async fn page(address: SocketAddr, path: &str) -> (u16, String) {
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n");
        let answer = ask(address, request.as_bytes()).await;
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head[9..12].parse().unwrap(), body.to_owned())
    }

    #[tokio::test]
    async fn the_three_pages_answer() {
        let served = served(LONG).await;
        let (code, body) = page(served.address, "/metrics").await;
        assert_eq!(code, 200);
        assert!(body.contains("muster_build_info"));
        assert_eq!(page(served.address, "/healthz").await, (200, "ok\n".into()));
        assert_eq!(page(served.address, "/nothing").await.0, 404);

        let starting = (503, "not ready: starting\n".to_owned());
        assert_eq!(page(served.address, "/readyz").await, starting);
        let reasons = vec!["no peer".to_owned(), "store hangs".to_owned()];
        served.health.not_ready.send_replace(reasons);
        let both = (
            503,
            "not ready: no peer\nnot ready: store hangs\n".to_owned(),
        );
        assert_eq!(page(served.address, "/readyz").await, both);
        served.health.not_ready.send_replace(Vec::new());
        assert_eq!(
            page(served.address, "/readyz").await,
            (200, "ready\n".into())
        );
    }

    #[tokio::test]
    async fn a_loop_that_hangs_is_unhealthy_until_it_runs_again() {
        let served = served(Duration::from_millis(300)).await;
        let from = Instant::now();
        let text = loop {
            let (code, text) = page(served.address, "/healthz").await;
            if code == 503 {
                break text;
            }
            assert!(from.elapsed() < LONG);
        };
        assert!(from.elapsed() >= Duration::from_millis(250));
        assert!(
            text.contains("has not run for") && text.contains("limit 0.3 s"),
            "{text}"
        );
        let health = loop {
            served.health.watchdog.touch();
            let (code, text) = page(served.address, "/healthz").await;
            if code == 200 {
                break text;
            }
            assert!(from.elapsed() < LONG);
        };
        assert_eq!(health, "ok\n");
    }

    #[tokio::test]
    async fn it_is_read_only() {
        let served = served(LONG).await;
        for method in ["POST", "PUT", "DELETE", "PATCH"] {
            let request =
                format!("{method} /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n");
            let answer = ask(served.address, request.as_bytes()).await;
            assert!(answer.starts_with("HTTP/1.1 405"), "{answer}");
        }
    }

    #[tokio::test]
    async fn oversized_and_random_requests_are_refused() {
        let served = served(LONG).await;
        let many = "A: b\r\n".repeat(MAX_HEADERS + 1);
        let many = format!("GET /healthz HTTP/1.1\r\n{many}\r\n");
        let answer = ask(served.address, many.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
        let long = format!(
            "GET /healthz HTTP/1.1\r\nA: {}\r\n\r\n",
            "x".repeat(2 * MAX_HEAD)
        );
        let answer = ask(served.address, long.as_bytes()).await;
        assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");
        let answer = ask(served.address, &[0xff; 3000]).await;
        assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");
        assert_eq!(page(served.address, "/healthz").await.0, 200);
    }

    #[tokio::test]
    async fn clients_that_say_nothing_make_way() {
        let served = served(LONG).await;
        let mut silent = Vec::new();
        for _ in 0..MAX_CONNECTIONS {
            silent.push(TcpStream::connect(served.address).await.unwrap());
        }
        // Waits for a free place, at most until the silent ones are cut off.
        assert_eq!(page(served.address, "/healthz").await.0, 200);
    }

    #[tokio::test]
    async fn a_taken_port_is_named_with_the_fix() {
        let first = served(LONG).await;
        let metrics = Metrics::new("1.0.0", "abc").unwrap();
        let error = Server::bind(first.address, metrics, &Health::default())
            .await
            .unwrap_err()
            .to_string();
        let port = first.address.port().to_string();
        assert!(error.contains(&port) && error.contains("--http"), "{error}");
    }
}
