//! The agent's counters and measurements, for `/metrics`.
//!
//! Names follow Prometheus' own rules: the prefix `muster_`, base units, `_total` on counters. No
//! label of the agent's own metrics takes a value that a user or a peer can choose, so the number of
//! their series is bounded by this build; that is why labels are `&'static str`. The metrics of
//! training have the labels job, rank and node: as many series as ranks run here, and they go with
//! them ([`Metrics::forget_training`]).

use std::time::Duration;

use muster_protocol::control::report::Metrics as Training;
use prometheus::core::Collector;
use prometheus::{
    Counter, CounterVec, Encoder, Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec,
    IntCounter, IntCounterVec, IntGauge, Opts, Registry, TextEncoder,
};

/// The content type of [`Metrics::render`].
pub const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Seconds. A phase of a recovery lasts between a message's round trip and a worker's cold start.
const PHASE_BUCKETS: &[f64] = &[
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0,
];
/// Seconds. An fsync takes from 0.1 ms (NVMe) to seconds (a busy disk).
const PERSIST_BUCKETS: &[f64] = &[
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0,
];
/// Seconds. Round trips from one host to another continent.
const RTT_BUCKETS: &[f64] = &[
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0,
];

/// Every metric of one agent. Cheap to clone; clones count together.
#[derive(Debug, Clone)]
pub struct Metrics {
    registry: Registry,
    /// Connected and authenticated peers.
    pub peers_connected: IntGauge,
    /// Jobs that this agent knows.
    pub jobs: IntGauge,
    /// Bytes of checkpoint slots whose launcher is gone.
    pub slots_waiting: IntGauge,
    /// Newest saves in a row that other nodes do not hold as they are to, of the job that has most.
    pub replicas_behind: IntGauge,
    pub messages_sent: IntCounter,
    pub messages_received: IntCounter,
    generation_changes: IntCounterVec,
    recovery_phase: HistogramVec,
    persist: Histogram,
    store_ops: IntCounterVec,
    heartbeat_rtt: Histogram,
    auth_failures: IntCounterVec,
    resident: Gauge,
    cpu: Counter,
    training: TrainingMetrics,
}

/// Metrics that workers report.
#[derive(Debug, Clone)]
struct TrainingMetrics {
    gauges: [GaugeVec; 5],
    counters: [CounterVec; 5],
}

impl TrainingMetrics {
    const LABELS: [&str; 4] = ["job", "owner", "rank", "node"];

    fn new(build: &Builder) -> prometheus::Result<TrainingMetrics> {
        let gauge = |name, help| build.add(GaugeVec::new(Opts::new(name, help), &Self::LABELS));
        let counter = |name, help| build.add(CounterVec::new(Opts::new(name, help), &Self::LABELS));
        Ok(TrainingMetrics {
            gauges: [
                gauge("muster_training_loss", "The newest training loss.")?,
                gauge(
                    "muster_training_samples_per_second",
                    "Samples of this rank that are trained on in a second; the sum over ranks is the job's.",
                )?,
                gauge("muster_training_learning_rate", "The learning rate.")?,
                gauge(
                    "muster_training_loss_scale",
                    "The factor of dynamic loss scaling.",
                )?,
                gauge("muster_training_world_size", "Ranks that train together.")?,
            ],
            counters: [
                counter(
                    "muster_training_steps_total",
                    "Steps since the worker began.",
                )?,
                counter(
                    "muster_training_data_seconds_total",
                    "Time that the worker waited for data.",
                )?,
                counter(
                    "muster_training_compute_seconds_total",
                    "Time of forward, backward and optimizer.",
                )?,
                counter(
                    "muster_training_communication_seconds_total",
                    "Time in collectives.",
                )?,
                counter(
                    "muster_training_gradient_sync_seconds_total",
                    "Time that steps waited for gradients.",
                )?,
            ],
        })
    }
}

/// Makes metrics and registers them; the first error is kept.
struct Builder {
    registry: Registry,
}

impl Builder {
    fn add<M: Collector + Clone + 'static>(
        &self,
        metric: prometheus::Result<M>,
    ) -> prometheus::Result<M> {
        let metric = metric?;
        self.registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn histogram(name: &str, help: &str, buckets: &[f64]) -> HistogramOpts {
        HistogramOpts::new(name, help).buckets(buckets.to_vec())
    }
}

impl Metrics {
    /// `commit` is the build's commit, or "unknown".
    pub fn new(version: &str, commit: &str) -> prometheus::Result<Metrics> {
        let build = Builder {
            registry: Registry::new(),
        };
        let b = &build;
        let int = |name, help| b.add(IntCounter::new(name, help));
        let int_vec =
            |name, help, label: &[&str]| b.add(IntCounterVec::new(Opts::new(name, help), label));
        let info = b.add(prometheus::IntGaugeVec::new(
            Opts::new(
                "muster_build_info",
                "Always 1; the labels name the running build.",
            ),
            &["version", "commit"],
        ))?;
        info.with_label_values(&[version, commit]).set(1);
        Ok(Metrics {
            peers_connected: b.add(IntGauge::new(
                "muster_peers_connected",
                "Agents that are connected and have proven the cluster secret.",
            ))?,
            jobs: b.add(IntGauge::new("muster_jobs", "Jobs with a generation that goes on, as far as this agent knows."))?,
            slots_waiting: b.add(IntGauge::new(
                "muster_checkpoint_slots_waiting_bytes",
                "Memory of checkpoint slots whose launcher is gone, held for its job's next one.",
            ))?,
            replicas_behind: b.add(IntGauge::new(
                "muster_checkpoint_replicas_behind_saves",
                "Newest saves in a row of this node that other nodes do not hold in memory as they are to (copies or parity), of the job here that has most.",
            ))?,
            messages_sent: int(
                "muster_messages_sent_total",
                "Control messages sent to other agents.",
            )?,
            messages_received: int(
                "muster_messages_received_total",
                "Control messages received from other agents.",
            )?,
            generation_changes: int_vec(
                "muster_generation_changes_total",
                "Generations that were decided, by cause.",
                &["cause"],
            )?,
            recovery_phase: b.add(HistogramVec::new(
                Builder::histogram(
                    "muster_recovery_phase_seconds",
                    "Time of each phase of a generation change.",
                    PHASE_BUCKETS,
                ),
                &["phase"],
            ))?,
            persist: b.add(Histogram::with_opts(Builder::histogram(
                "muster_persist_seconds",
                "Time to make one change of the agent's state durable.",
                PERSIST_BUCKETS,
            )))?,
            store_ops: int_vec(
                "muster_store_ops_total",
                "Operations on jobs' stores, by operation and result.",
                &["op", "result"],
            )?,
            heartbeat_rtt: b.add(Histogram::with_opts(Builder::histogram(
                "muster_heartbeat_rtt_seconds",
                "Time from a heartbeat's sending to its answer.",
                RTT_BUCKETS,
            )))?,
            auth_failures: int_vec(
                "muster_auth_failures_total",
                "Peers that were cut off before anything was served to them, by reason.",
                &["reason"],
            )?,
            resident: b.add(Gauge::new(
                "process_resident_memory_bytes",
                "Resident memory size in bytes.",
            ))?,
            cpu: b.add(Counter::new(
                "process_cpu_seconds_total",
                "User and system CPU time spent in seconds.",
            ))?,
            training: TrainingMetrics::new(b)?,
            registry: build.registry,
        })
    }

    pub fn generation_change(&self, cause: &'static str) {
        self.generation_changes.with_label_values(&[cause]).inc();
    }

    pub fn recovery_phase(&self, phase: &'static str, took: Duration) {
        let histogram = self.recovery_phase.with_label_values(&[phase]);
        histogram.observe(took.as_secs_f64());
    }

    pub fn persisted(&self, took: Duration) {
        self.persist.observe(took.as_secs_f64());
    }

    pub fn store_op(&self, op: &'static str, result: &'static str) {
        self.store_ops.with_label_values(&[op, result]).inc();
    }

    pub fn heartbeat_rtt(&self, took: Duration) {
        self.heartbeat_rtt.observe(took.as_secs_f64());
    }

    pub fn auth_failure(&self, reason: &'static str) {
        self.auth_failures.with_label_values(&[reason]).inc();
    }

    /// Shows what a worker reported, under its job, the job's owner, rank and node. Values that it does not know are
    /// not shown.
    pub fn training(&self, labels: &[String; 4], training: &Training) {
        let world = match training.world {
            0 => f64::NAN,
            world => world.into(),
        };
        let gauges = [
            training.training_loss,
            training.samples_per_second,
            training.learning_rate,
            training.loss_scale,
            world,
        ];
        for (gauge, value) in self.training.gauges.iter().zip(gauges) {
            if value.is_nan() {
                let _absent = gauge.remove_label_values(labels);
            } else {
                gauge.with_label_values(labels).set(value);
            }
        }
        let counters = [
            training.steps as f64,
            training.data_seconds,
            training.compute_seconds,
            training.communication_seconds,
            training.gradient_sync_seconds,
        ];
        for (counter, value) in self.training.counters.iter().zip(counters) {
            if !value.is_finite() || value < 0.0 {
                let _absent = counter.remove_label_values(labels);
                continue;
            }
            if counter.with_label_values(labels).get() > value {
                // Another process under the same rank: its counters begin at zero.
                let _there = counter.remove_label_values(labels);
            }
            let counter = counter.with_label_values(labels);
            counter.inc_by((value - counter.get()).max(0.0));
        }
    }

    /// The worker is gone, and so is what it reported.
    pub fn forget_training(&self, labels: &[String; 4]) {
        for gauge in &self.training.gauges {
            let _absent = gauge.remove_label_values(labels);
        }
        for counter in &self.training.counters {
            let _absent = counter.remove_label_values(labels);
        }
    }

    /// Everything in Prometheus' text format ([`CONTENT_TYPE`]).
    pub fn render(&self) -> prometheus::Result<Vec<u8>> {
        self.look_at_the_process();
        let mut out = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut out)?;
        Ok(out)
    }

    fn look_at_the_process(&self) {
        if let Some(bytes) = resident_bytes() {
            self.resident.set(bytes);
        }
        let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        let seconds = now.tv_sec as f64 + now.tv_nsec as f64 / 1e9;
        // A counter can only be added to. Two scrapes at once may both add; the next one, seeing
        // no difference, adds nothing.
        self.cpu.inc_by((seconds - self.cpu.get()).max(0.0));
    }
}

/// The second field of `/proc/self/statm` counts resident pages (proc_pid_statm(5)).
fn resident_bytes() -> Option<f64> {
    let text = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split(' ').nth(1)?.parse().ok()?;
    Some(pages as f64 * rustix::param::page_size() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used() -> Metrics {
        let metrics = Metrics::new("1.2.3", "abc").unwrap();
        metrics.peers_connected.set(3);
        metrics.jobs.inc();
        metrics.messages_sent.inc();
        metrics.generation_change("node_lost");
        metrics.recovery_phase("detect", Duration::from_millis(30));
        metrics.persisted(Duration::from_micros(400));
        metrics.store_op("create", "won");
        metrics.heartbeat_rtt(Duration::from_micros(90));
        metrics.auth_failure("wrong_secret");
        metrics.training(
            &labels(),
            &Training {
                steps: 12,
                world: 4,
                training_loss: 0.25,
                data_seconds: 1.5,
                ..Training::default()
            },
        );
        metrics
    }

    fn labels() -> [String; 4] {
        ["tr\"ain".into(), "1000".into(), "3".into(), "gpu-a".into()]
    }

    #[test]
    fn what_a_worker_reports_is_shown_until_it_is_gone() {
        let metrics = used();
        let shown = |metrics: &Metrics| -> Vec<String> {
            let text = text(metrics);
            let lines = text.lines().filter(|l| l.starts_with("muster_training_"));
            lines.map(str::to_owned).collect()
        };
        let at = r#"{job="tr\"ain",node="gpu-a",owner="1000",rank="3"}"#;
        let expected = [
            format!("muster_training_data_seconds_total{at} 1.5"),
            format!("muster_training_loss{at} 0.25"),
            format!("muster_training_steps_total{at} 12"),
            format!("muster_training_world_size{at} 4"),
        ];
        assert_eq!(shown(&metrics), expected);
        // Another process of the same rank: it counts from zero, and knows no loss yet.
        let again = Training {
            steps: 1,
            ..Training::default()
        };
        metrics.training(&labels(), &again);
        assert_eq!(
            shown(&metrics),
            [format!("muster_training_steps_total{at} 1")]
        );
        metrics.forget_training(&labels());
        assert!(shown(&metrics).is_empty());
    }

    fn text(metrics: &Metrics) -> String {
        String::from_utf8(metrics.render().unwrap()).unwrap()
    }

    #[test]
    fn what_was_counted_is_shown() {
        let metrics = used();
        let text = text(&metrics);
        for line in [
            r#"muster_build_info{commit="abc",version="1.2.3"} 1"#,
            "muster_peers_connected 3",
            "muster_jobs 1",
            r#"muster_generation_changes_total{cause="node_lost"} 1"#,
            r#"muster_recovery_phase_seconds_count{phase="detect"} 1"#,
            "muster_messages_sent_total 1",
            "muster_messages_received_total 0",
            "muster_persist_seconds_count 1",
            r#"muster_store_ops_total{op="create",result="won"} 1"#,
            "muster_heartbeat_rtt_seconds_sum 0.00009",
            r#"muster_auth_failures_total{reason="wrong_secret"} 1"#,
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn the_process_is_measured() {
        let metrics = used();
        let value = |name: &str| -> f64 {
            let text = text(&metrics);
            let line = text.lines().find(|l| l.starts_with(name)).unwrap();
            line.rsplit(' ').next().unwrap().parse().unwrap()
        };
        assert!(value("process_resident_memory_bytes ") > 1e6);
        let before = value("process_cpu_seconds_total ");
        let mut x = 1u64;
        while value("process_cpu_seconds_total ") <= before {
            x = std::hint::black_box(x.wrapping_mul(3));
        }
    }

    /// The rules of `promtool check metrics` (prometheus `util/promlint`), as far as they can
    /// apply here.
    #[test]
    fn the_text_passes_the_linter() {
        let text = text(&used());
        let kind_of: std::collections::BTreeMap<&str, &str> = text
            .lines()
            .filter_map(|l| l.strip_prefix("# TYPE ")?.split_once(' '))
            .collect();
        assert!(kind_of.len() >= 13);
        for (name, kind) in kind_of {
            assert!(
                text.lines()
                    .any(|l| l.starts_with(&format!("# HELP {name} "))),
                "{name} has no help"
            );
            assert_eq!(name.ends_with("_total"), kind == "counter", "{name}");
            assert!(
                name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'),
                "{name}"
            );
            for suffix in ["_count", "_sum", "_bucket"] {
                assert!(!name.ends_with(suffix), "{name}");
            }
            for unit in [
                "milliseconds",
                "ms",
                "minutes",
                "kilobytes",
                "mb",
                "percent",
                "kind",
                "type",
            ] {
                assert!(!name.split('_').any(|part| part == unit), "{name}");
            }
        }
    }
}
