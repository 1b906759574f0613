//! Which processes are watched. Pure.

use std::collections::HashMap;

use super::config::DiscoveryConfig;

/// The rules of a configuration, users resolved to numbers.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    rss_min_bytes: u64,
    include: Vec<String>,
    exclude: Vec<String>,
    users: Option<Vec<u32>>,
    exclude_users: Vec<u32>,
    /// Names of users that `passwd` does not have: they match nobody.
    pub unknown_users: Vec<String>,
}

impl Rules {
    /// Resolves the users of a configuration with the text of `/etc/passwd` (passwd(5): name, password, uid, …, by colons).
    #[must_use]
    pub fn new(config: &DiscoveryConfig, passwd: &str) -> Self {
        let by_name: HashMap<&str, u32> = passwd
            .lines()
            .filter_map(|line| {
                let mut fields = line.split(':');
                let name = fields.next()?;
                Some((name, fields.nth(1)?.parse().ok()?))
            })
            .collect();
        let mut unknown_users = Vec::new();
        let mut resolve = |names: &[String]| -> Vec<u32> {
            let mut uids = Vec::new();
            for name in names {
                match name.parse().ok().or_else(|| by_name.get(name.as_str()).copied()) {
                    Some(uid) => uids.push(uid),
                    None => unknown_users.push(name.clone()),
                }
            }
            uids
        };
        let users = resolve(&config.users);
        let exclude_users = resolve(&config.exclude_users);
        Self {
            rss_min_bytes: config.rss_min_mib << 20,
            include: config.include.clone(),
            exclude: config.exclude.clone(),
            // A list whose names are all unknown allows nobody, not everybody.
            users: (!config.users.is_empty()).then_some(users),
            exclude_users,
            unknown_users,
        }
    }

    /// Whether a process of this name and size comes into question; asked before the user is looked up, which costs more.
    #[must_use]
    pub fn allow_name(&self, comm: &str, rss_bytes: u64) -> bool {
        rss_bytes >= self.rss_min_bytes
            && (self.include.is_empty() || self.include.iter().any(|pattern| glob(pattern, comm)))
            && !self.exclude.iter().any(|pattern| glob(pattern, comm))
    }

    /// Whether processes of this user are watched.
    #[must_use]
    pub fn allow_user(&self, uid: u32) -> bool {
        self.users.as_ref().is_none_or(|users| users.contains(&uid)) && !self.exclude_users.contains(&uid)
    }
}

/// Whether `text` is of the form of `pattern`: `*` is any text, `?` any character. Goes back to the last `*` only, so it takes at most
/// pattern × text steps.
pub fn glob(pattern: &str, text: &str) -> bool {
    let pattern: Vec<char> = pattern.chars().collect();
    let text: Vec<char> = text.chars().collect();
    let (mut p, mut t) = (0, 0);
    let mut back: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some('*') => {
                back = Some((p, t));
                p += 1;
            }
            Some(&c) if c == '?' || text.get(t) == Some(&c) => {
                p += 1;
                t += 1;
            }
            _ => {
                let Some((star, from)) = back else { return false };
                back = Some((star, from + 1));
                p = star + 1;
                t = from + 1;
            }
        }
    }
    pattern.iter().skip(p).all(|&c| c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\nbroken line\nwww-data:x:33:33::/var/www:/bin/false\n";

    fn list(names: &[&str]) -> Vec<String> {
        names.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn patterns_match_whole_names() {
        for (pattern, text, expected) in [
            ("redis-*", "redis-server", true),
            ("redis", "redis-server", false),
            ("*", "", true),
            ("?", "é", true),
            ("a*b*c", "aXbYbZc", true),
            ("a*b*c", "aXbYbZ", false),
            ("*a*a*a*a*a*b", "aaaaaaaaaaaaaaa", false),
            ("", "x", false),
        ] {
            assert_eq!(glob(pattern, text), expected, "{pattern} {text}");
        }
    }

    #[test]
    fn exclude_beats_include_and_small_processes_are_left_out() {
        let config =
            DiscoveryConfig { rss_min_mib: 16, include: list(&["java", "re*"]), exclude: list(&["redis-cli"]), ..Default::default() };
        let rules = Rules::new(&config, PASSWD);
        assert!(rules.allow_name("java", 16 << 20) && rules.allow_name("redis-server", 1 << 30));
        assert!(!rules.allow_name("java", (16 << 20) - 1));
        assert!(!rules.allow_name("redis-cli", 1 << 30) && !rules.allow_name("nginx", 1 << 30));
    }

    #[test]
    fn users_are_told_by_name_or_number() {
        let config = DiscoveryConfig { users: list(&["www-data", "1000"]), exclude_users: list(&["root"]), ..Default::default() };
        let rules = Rules::new(&config, PASSWD);
        assert!(rules.allow_user(33) && rules.allow_user(1000) && !rules.allow_user(0) && !rules.allow_user(5));
        let nobody = Rules::new(&DiscoveryConfig { users: list(&["nosuch"]), ..Default::default() }, PASSWD);
        assert!(!nobody.allow_user(0) && !nobody.allow_user(33));
        assert_eq!(nobody.unknown_users, ["nosuch"]);
    }
}
