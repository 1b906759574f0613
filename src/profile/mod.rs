//! The one profile model, its encoders (pprof, folded, SVG, JSON) and the difference of two profiles.
