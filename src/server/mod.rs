//! HTTP: metrics, health and the API.
