//! Addresses to frames: function, file, line and module.
