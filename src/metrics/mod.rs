//! Prometheus exposition of the sample model.
