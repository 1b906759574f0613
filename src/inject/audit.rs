//! Who has a call made, for the lines that account for it.

use std::fmt;

/// The target of these lines in the agent's log.
pub const TARGET: &str = "audit";
/// The directive that shows them whatever else is shown.
pub const TARGET_SHOWN: &str = "audit=info";

/// Who has a call made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum By {
    /// A user, by a command.
    User {
        /// Effective user id.
        uid: u32,
        /// The user who logged in (`/proc/self/loginuid`); `None` if there was no login.
        login: Option<u32>,
    },
    /// The agent's policy: the section of its configuration.
    Policy(&'static str),
}

impl fmt::Display for By {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(section) => write!(f, "policy [{section}]"),
            Self::User { uid, login: Some(login) } if login != uid => write!(f, "uid {uid}, logged in as {login}"),
            Self::User { uid, .. } => write!(f, "uid {uid}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_named_by_the_login_too_if_that_is_another() {
        assert_eq!(By::User { uid: 5, login: Some(5) }.to_string(), "uid 5");
        assert_eq!(By::User { uid: 0, login: Some(5) }.to_string(), "uid 0, logged in as 5");
    }
}
