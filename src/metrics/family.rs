//! A metric family, filled sample by sample.

use prometheus::proto::{Counter, Gauge, LabelPair, Metric, MetricFamily, MetricType};

/// A name, its help and its samples.
#[derive(Debug)]
pub struct Family {
    name: &'static str,
    help: &'static str,
    kind: MetricType,
    metrics: Vec<Metric>,
}

impl Family {
    /// A value that can rise and fall.
    #[must_use]
    pub fn gauge(name: &'static str, help: &'static str) -> Self {
        Self { name, help, kind: MetricType::GAUGE, metrics: Vec::new() }
    }

    /// A value that only rises while the agent runs.
    #[must_use]
    pub fn counter(name: &'static str, help: &'static str) -> Self {
        Self { name, help, kind: MetricType::COUNTER, metrics: Vec::new() }
    }

    /// Adds a sample.
    pub fn add(&mut self, labels: &[(&str, &str)], value: f64) {
        let pair = |&(name, value): &(&str, &str)| {
            let mut pair = LabelPair::default();
            pair.set_name(name.to_owned());
            pair.set_value(value.to_owned());
            pair
        };
        let mut metric = Metric::from_label(labels.iter().map(pair).collect());
        if self.kind == MetricType::COUNTER {
            let mut counter = Counter::default();
            counter.set_value(value);
            metric.set_counter(counter);
        } else {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            metric.set_gauge(gauge);
        }
        self.metrics.push(metric);
    }

    /// With one sample without labels.
    #[must_use]
    pub fn with(mut self, value: f64) -> Self {
        self.add(&[], value);
        self
    }

    /// With one sample for each value of a label.
    #[must_use]
    pub fn with_each<'a>(mut self, label: &str, values: impl IntoIterator<Item = (&'a str, f64)>) -> Self {
        for (name, value) in values {
            self.add(&[(label, name)], value);
        }
        self
    }

    /// Without the samples of processes.
    #[must_use]
    pub fn without_processes(mut self) -> Self {
        self.metrics.retain(|metric| !metric.get_label().iter().any(|pair| pair.name() == "pid"));
        self
    }

    /// The family for the encoder; `None` without samples, which the format does not allow.
    #[must_use]
    pub fn into_proto(self) -> Option<MetricFamily> {
        if self.metrics.is_empty() {
            return None;
        }
        let mut family = MetricFamily::default();
        family.set_name(self.name.to_owned());
        family.set_help(self.help.to_owned());
        family.set_field_type(self.kind);
        family.set_metric(self.metrics);
        Some(family)
    }
}
