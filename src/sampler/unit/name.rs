//! Names of units. One becomes part of a path, so nothing else is accepted.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Longest name (`UNIT_NAME_MAX`).
const BYTES_MAX: usize = 255;

/// Why a text is no service's name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NameError {
    /// A character that systemd does not allow, among them `/`; or empty, too long, `..`.
    #[error("\"{0}\" is not the name of a unit: letters, digits and :-_.\\@ are allowed, no path")]
    Invalid(String),
    /// A unit without processes.
    #[error("{0} is not a service")]
    NotAService(String),
}

/// The name of a service, with its suffix.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnitName(String);

impl FromStr for UnitName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let invalid = || Err(NameError::Invalid(text.to_owned()));
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b":-_.\\@".contains(&byte);
        if text.is_empty() || !text.bytes().all(is_allowed) || text.contains("..") || text.starts_with(['.', '@', '-']) {
            return invalid();
        }
        const OTHERS: [&str; 10] =
            [".socket", ".target", ".device", ".mount", ".automount", ".swap", ".timer", ".path", ".slice", ".scope"];
        if OTHERS.iter().any(|suffix| text.ends_with(suffix)) {
            return Err(NameError::NotAService(text.to_owned()));
        }
        let name = if text.ends_with(".service") { text.to_owned() } else { format!("{text}.service") };
        if name.len() > BYTES_MAX || name == ".service" {
            return invalid();
        }
        Ok(Self(name))
    }
}

impl UnitName {
    /// The whole name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Without the suffix.
    #[must_use]
    pub fn stem(&self) -> &str {
        self.0.strip_suffix(".service").unwrap_or(&self.0)
    }

    /// What is before the `@`, or the stem.
    #[must_use]
    pub fn prefix(&self) -> &str {
        self.stem().split_once('@').map_or(self.stem(), |(prefix, _)| prefix)
    }

    /// The instance of a template: what is between `@` and the suffix; `None` for a template and for other units.
    #[must_use]
    pub fn instance(&self) -> Option<&str> {
        self.stem().split_once('@').map(|(_, instance)| instance).filter(|instance| !instance.is_empty())
    }

    /// Whether it is a template, `name@.service`.
    #[must_use]
    pub fn is_template(&self) -> bool {
        self.stem().ends_with('@')
    }

    /// The template of an instance.
    #[must_use]
    pub fn template(&self) -> Option<Self> {
        self.instance().map(|_| Self(format!("{}@.service", self.prefix())))
    }

    /// The instance of this template; a name that is no template is itself. `None` if the instance's name is not valid.
    #[must_use]
    pub fn of_instance(self, instance: Option<&str>) -> Option<Self> {
        match instance {
            Some(instance) if self.is_template() => format!("{}@{instance}.service", self.prefix()).parse().ok(),
            _ => Some(self),
        }
    }

    /// Names whose drop-ins apply to it, the most specific first: its own, its template's, those of its prefixes at dashes, of all services.
    #[must_use]
    pub fn drop_in_names(&self) -> Vec<String> {
        let mut names = vec![self.0.clone()];
        names.extend(self.template().map(|template| template.0));
        let prefix = self.prefix();
        let at = if self.stem().contains('@') { "@" } else { "" };
        let dashes: Vec<usize> = prefix.match_indices('-').map(|(at, _)| at).filter(|at| *at + 1 < prefix.len()).collect();
        names.extend(dashes.into_iter().rev().map(|dash| format!("{}{at}.service", &prefix[..=dash])));
        names.push("service".to_owned());
        names
    }
}

impl fmt::Display for UnitName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_name_is_no_path() {
        for bad in ["", "a/b", "../x", "a..b", "/etc", "a b", "a\nb", "ä", ".service", "@x", "-x", &"x".repeat(250)] {
            assert!(matches!(bad.parse::<UnitName>(), Err(NameError::Invalid(_))), "{bad}");
        }
        assert!(matches!("x.socket".parse::<UnitName>(), Err(NameError::NotAService(_))));
        assert_eq!("nginx".parse::<UnitName>().unwrap().as_str(), "nginx.service");
        assert_eq!(r"a\x2db.service".parse::<UnitName>().unwrap().stem(), r"a\x2db");
    }

    #[test]
    fn an_instance_has_its_templates_drop_ins() {
        let name: UnitName = "my-web-app@blue".parse().unwrap();
        assert_eq!((name.prefix(), name.instance(), name.is_template()), ("my-web-app", Some("blue"), false));
        assert_eq!(name.drop_in_names(), ["my-web-app@blue.service", "my-web-app@.service", "my-web-@.service", "my-@.service", "service"]);
        let template = name.template().unwrap();
        assert!(template.is_template());
        assert_eq!(template.of_instance(Some("green")).unwrap().as_str(), "my-web-app@green.service");
    }
}
