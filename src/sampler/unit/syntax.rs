//! The syntax of systemd's unit files and environment files (systemd.syntax(7), systemd.exec(5)), as far as it decides which program is
//! started with which `LD_PRELOAD`. Pure; any bytes may be given.

/// The assignments of a section, in order. A line that ends in a backslash goes on in the next one; comments in between are left out.
#[must_use]
pub fn assignments<'a>(text: &'a str, section: &str) -> Vec<(&'a str, String)> {
    let mut found = Vec::new();
    let mut is_inside = false;
    let mut open: Option<(&str, String)> = None;
    for line in text.lines() {
        let trimmed = line.trim();
        if let Some((key, mut value)) = open.take() {
            if trimmed.starts_with(['#', ';']) {
                open = Some((key, value));
            } else if let Some(part) = trimmed.strip_suffix('\\') {
                value.push(' ');
                value.push_str(part.trim_end());
                open = Some((key, value));
            } else {
                value.push(' ');
                value.push_str(trimmed);
                found.push((key, value.trim().to_owned()));
            }
            continue;
        }
        if trimmed.is_empty() || trimmed.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = trimmed.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            is_inside = name == section;
            continue;
        }
        let Some((key, value)) = trimmed.split_once('=').filter(|_| is_inside) else { continue };
        let (key, value) = (key.trim_end(), value.trim_start());
        match value.strip_suffix('\\') {
            Some(part) => open = Some((key, part.trim_end().to_owned())),
            None => found.push((key, value.to_owned())),
        }
    }
    found.extend(open);
    found
}

/// Splits a value into words: blanks separate, single and double quotes keep them together, a backslash escapes (C's sequences; others are
/// kept as they are).
#[must_use]
pub fn words(value: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut characters = value.chars();
    while let Some(character) = characters.next() {
        if character == '\\' {
            let text = word.get_or_insert_default();
            match characters.next() {
                Some('n') => text.push('\n'),
                Some('t') => text.push('\t'),
                Some('s') => text.push(' '),
                Some('r') => text.push('\r'),
                Some('x') => {
                    let digits: String = characters.clone().take(2).collect();
                    match u8::from_str_radix(&digits, 16) {
                        Ok(byte) if byte != 0 && byte.is_ascii() && digits.len() == 2 => {
                            text.push(char::from(byte));
                            characters.nth(1);
                        }
                        _ => text.push_str("\\x"),
                    }
                }
                Some(other) => text.push(other),
                None => text.push('\\'),
            }
            continue;
        }
        match quote {
            Some(open) if character == open => quote = None,
            Some(_) => word.get_or_insert_default().push(character),
            None if character == '"' || character == '\'' => {
                word.get_or_insert_default();
                quote = Some(character);
            }
            None if character.is_whitespace() => found.extend(word.take()),
            None => word.get_or_insert_default().push(character),
        }
    }
    found.extend(word);
    found
}

/// Expands the specifiers of a unit's name; `None` if another one is used, whose value is not known here.
#[must_use]
pub fn expanded(text: &str, name: &super::name::UnitName) -> Option<String> {
    let mut out = String::with_capacity(text.len());
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        match characters.next()? {
            '%' => out.push('%'),
            'n' if !name.is_template() => out.push_str(name.as_str()),
            'N' if !name.is_template() => out.push_str(name.stem()),
            'p' => out.push_str(name.prefix()),
            'i' => out.push_str(name.instance()?),
            _ => return None,
        }
    }
    Some(out)
}

/// The last value of a variable in an environment file.
#[must_use]
pub fn variable_of_file(text: &str, variable: &str) -> Option<String> {
    let mut found = None;
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let mut line = line.trim_start().to_owned();
        if line.starts_with(['#', ';']) {
            continue;
        }
        while line.ends_with('\\') {
            line.pop();
            let Some(next) = lines.next() else { break };
            line.push_str(next);
        }
        let Some((key, value)) = line.split_once('=') else { continue };
        if key.trim() == variable {
            let value = value.trim();
            // Blanks within a value that is not quoted belong to it.
            found = Some(if value.contains(['"', '\'', '\\']) { words(value).join(" ") } else { value.to_owned() });
        }
    }
    found
}

/// A value as an item of `Environment=`.
#[must_use]
pub fn quoted_assignment(variable: &str, value: &str) -> String {
    format!("\"{variable}={}\"", value.replace('\\', "\\\\").replace('"', "\\\"").replace('%', "%%"))
}

/// A line of an environment file.
#[must_use]
pub fn quoted_line(variable: &str, value: &str) -> String {
    format!("{variable}=\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\"").replace('$', "\\$").replace('`', "\\`"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use proptest::prelude::*;

    use super::*;
    use crate::sampler::unit::name::UnitName;

    #[test]
    fn assignments_of_a_section_are_read_as_systemd_reads_them() {
        let text = "[Unit]\nExecStart=/no\n[Service]\n# x\nExecStart = /bin/a \\\n# between\n  -b \\\n  -c\nEnvironment=\n;y\n[Install]\nAlias=x\n";
        assert_eq!(assignments(text, "Service"), [("ExecStart", "/bin/a -b -c".to_owned()), ("Environment", String::new())]);
        assert_eq!(assignments("[Service]\nA=b \\", "Service"), [("A", "b".to_owned())]);
    }

    #[test]
    fn words_are_split_at_blanks_outside_of_quotes() {
        assert_eq!(words(r#"A=1 "B=x y" 'C="' D=a\x20b E=\"q "" F=\\"#), ["A=1", "B=x y", "C=\"", "D=a b", "E=\"q", "", "F=\\"]);
    }

    #[test]
    fn specifiers_of_the_name_are_expanded_and_others_are_not_guessed() {
        let name: UnitName = "web-app@blue.service".parse().unwrap();
        assert_eq!(expanded("/run/%p/%i/100%%", &name).unwrap(), "/run/web-app/blue/100%");
        assert_eq!(expanded("%h/x", &name), None);
        assert_eq!(expanded("%i", &"web@.service".parse().unwrap()), None);
    }

    #[test]
    fn the_last_value_of_an_environment_file_counts() {
        let text = "# LD_PRELOAD=/no\nLD_PRELOAD=/a.so\n LD_PRELOAD = \"/b.so \\\n/c.so\"\nOTHER=1\n";
        assert_eq!(variable_of_file(text, "LD_PRELOAD").unwrap(), "/b.so /c.so");
        assert_eq!(variable_of_file("LD_PRELOAD=/a.so /b.so\n", "LD_PRELOAD").unwrap(), "/a.so /b.so");
        assert_eq!(variable_of_file("X=1", "LD_PRELOAD"), None);
    }

    proptest! {
        #[test]
        fn what_is_quoted_is_read_back(value in "[ -~]{0,40}") {
            let item = quoted_assignment("V", &value);
            let expected = format!("V={value}");
            prop_assert_eq!(words(&item.replace("%%", "%")), [expected]);
            prop_assert_eq!(variable_of_file(&quoted_line("V", &value), "V"), Some(value));
        }
    }
}
