//! `fragprof completions`, `man` and `schema`: files generated from the definitions that the program itself uses.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Command, CommandFactory as _};
use clap_complete::Shell;
use serde_json::json;

use super::help::examples;
use super::{Cli, output};
use crate::error::{ExitStatus, Failed};
use crate::server::openapi;

/// Print a shell's completion script
#[derive(Debug, Args)]
#[command(after_help = examples(&[
    ("fragprof completions bash > /etc/bash_completion.d/fragprof", "Completions for bash"),
]))]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Write the man pages, one per command, into a directory
#[derive(Debug, Args)]
#[command(after_help = examples(&[
    ("fragprof man target/man", "Write fragprof.1 and one page per command"),
]))]
pub struct ManArgs {
    /// Output directory; created if it does not exist
    pub directory: PathBuf,
}

/// Print the JSON Schemas of the commands' and the API's output, or the OpenAPI description
#[derive(Debug, Args)]
#[command(after_help = examples(&[
    ("fragprof schema Census", "The output of `census --json`"),
    ("fragprof schema openapi", "The API's description"),
]))]
pub struct SchemaArgs {
    /// Name of one schema, such as Census, Verdict or ProcessView, or `openapi` for the API's description [default: all schemas]
    pub name: Option<String>,
}

/// Prints completions.
///
/// # Errors
/// If standard output cannot be written.
pub fn completions(args: &CompletionsArgs) -> anyhow::Result<()> {
    let mut text = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "fragprof", &mut text);
    output::to_stdout(|out| out.write_all(&text))
}

/// Writes the man pages.
///
/// # Errors
/// If the directory or a page cannot be written.
pub fn man(args: &ManArgs) -> anyhow::Result<()> {
    fs::create_dir_all(&args.directory).with_context(|| format!("cannot create {}", args.directory.display()))?;
    let mut command = Cli::command();
    command.build();
    page(&command, "fragprof", &args.directory)?;
    for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
        page(sub, &format!("fragprof-{}", sub.get_name()), &args.directory)?;
    }
    Ok(())
}

fn page(command: &Command, name: &str, directory: &Path) -> anyhow::Result<()> {
    // A leak of a few short names is fine: the commands are few and known at build time.
    let title: &'static str = Box::leak(name.to_owned().into_boxed_str());
    let page = clap_mangen::Man::new(command.clone().name(title));
    output::to_file(&directory.join(format!("{name}.1")), |out: &mut dyn Write| {
        let mut text = Vec::new();
        page.render(&mut text)?;
        out.write_all(&text)
    })
}

/// Prints schemas.
///
/// # Errors
/// Status 2 for a name that does not exist.
pub fn schema(args: &SchemaArgs) -> anyhow::Result<()> {
    let mut schemas = openapi::schemas();
    let document = match args.name.as_deref() {
        Some("openapi") => openapi::build(),
        None => json!({ "$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": schemas }),
        Some(name) => {
            let names: Vec<String> = schemas.keys().cloned().collect();
            let Some(mut schema) = schemas.remove(name) else {
                let message = format!("there is no schema {name:?}; there are: openapi, {}", names.join(", "));
                return Err(Failed::new(ExitStatus::Usage, message).into());
            };
            if let Some(schema) = schema.as_object_mut() {
                schema.insert("$schema".into(), json!("https://json-schema.org/draft/2020-12/schema"));
                schema.insert("$defs".into(), json!(schemas));
            }
            schema
        }
    };
    // References point into the document itself.
    let text = if args.name.as_deref() == Some("openapi") {
        serde_json::to_string_pretty(&document)?
    } else {
        serde_json::to_string_pretty(&document)?.replace("#/components/schemas/", "#/$defs/")
    };
    output::to_stdout(|out| -> io::Result<()> { writeln!(out, "{text}") })
}
