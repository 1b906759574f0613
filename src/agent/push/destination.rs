//! The server that profiles are sent to, according to the configuration and the current content of the files it names.

use crate::agent::config::{ConfigError, PushConfig};
use crate::client::{Access, Server};

/// A server, and the settings from which it was created.
#[derive(Debug, Clone)]
pub struct Destination {
    config: PushConfig,
    access: Access,
    server: Server,
}

impl Destination {
    /// The configured server, if there is one.
    ///
    /// # Errors
    /// If a file cannot be read, or does not contain what its key requires.
    pub fn open(config: &PushConfig) -> Result<Option<Self>, ConfigError> {
        let Some(address) = config.address()? else { return Ok(None) };
        let access = config.access()?;
        let server = Server::new(address, &access).map_err(|error| config.explain(&error))?;
        Ok(Some(Self { config: config.clone(), access, server }))
    }

    /// The server.
    #[must_use]
    pub fn server(&self) -> &Server {
        &self.server
    }

    /// Reads the files again: tokens and certificates are replaced while the agent runs. Returns whether anything has changed.
    ///
    /// # Errors
    /// As [`Self::open`]; the server is then unchanged.
    pub fn renew(&mut self) -> Result<bool, ConfigError> {
        let access = self.config.access()?;
        if access == self.access {
            return Ok(false);
        }
        self.server = Server::new(self.server.address().clone(), &access).map_err(|error| self.config.explain(&error))?;
        self.access = access;
        Ok(true)
    }
}
