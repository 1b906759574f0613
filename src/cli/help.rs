//! What `--help` shows beyond the definitions of the arguments: examples, and the developer commands under a heading of their own.

use clap::Command;
use clap::builder::StyledStr;
use clap::builder::styling::Styles;

/// Commands for work on fragprof itself.
const DEVELOPER: [&str; 3] = ["bench", "schema", "sites"];

/// The examples at the end of a command's help: command lines, each with what it does.
pub fn examples(lines: &[(&str, &str)]) -> StyledStr {
    section("Examples", lines)
}

/// Moves the developer commands out of the list of commands, into a section of their own.
///
/// clap has one heading for all subcommands, so these are hidden and listed in front of the examples.
pub fn with_developer_commands_apart(command: Command) -> Command {
    let about = |sub: &Command| (sub.get_name().to_owned(), sub.get_about().map(ToString::to_string).unwrap_or_default());
    let listed: Vec<(String, String)> = command.get_subcommands().filter(|sub| DEVELOPER.contains(&sub.get_name())).map(about).collect();
    let lines: Vec<(&str, &str)> = listed.iter().map(|(name, about)| (name.as_str(), about.as_str())).collect();
    let mut after = section("Developer commands", &lines);
    if let Some(examples) = command.get_after_help() {
        after.push_str("\n");
        after.push_str(&examples.ansi().to_string());
    }
    DEVELOPER.iter().fold(command, |command, name| command.mut_subcommand(name, |sub| sub.hide(true))).after_help(after)
}

/// A heading, and lines of two columns below it.
fn section(heading: &str, lines: &[(&str, &str)]) -> StyledStr {
    let styles = Styles::styled();
    let style = styles.get_header();
    let columns = lines.iter().map(|(left, _)| left.len()).max().unwrap_or(0);
    let mut text = format!("{style}{heading}:{style:#}\n");
    for (left, right) in lines {
        text.push_str(&format!("  {left:<columns$}  {right}\n"));
    }
    text.into()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use clap::CommandFactory as _;

    use super::*;
    use crate::cli::Cli;

    #[test]
    fn developer_commands_have_a_heading_of_their_own_and_examples_come_last() {
        let help = with_developer_commands_apart(Cli::command()).render_help().to_string();
        let (commands, rest) = help.split_once("Developer commands:").unwrap();
        let (developer, examples) = rest.split_once("Examples:").unwrap();
        for name in DEVELOPER {
            assert!(!commands.contains(&format!("\n  {name} ")) && developer.contains(&format!("\n  {name} ")), "{name}: {help}");
        }
        assert!(commands.contains("\n  record "), "{help}");
        assert!(examples.contains("fragprof record"), "{help}");
    }

    #[test]
    fn every_other_command_ends_its_help_with_examples() {
        for sub in Cli::command().get_subcommands_mut() {
            let help = sub.render_long_help().to_string();
            assert!(help.contains("\nExamples:\n"), "{help}");
        }
    }
}
