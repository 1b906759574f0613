//! The program that a process executes: whether it is still the one in which addresses were looked up.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use super::Refusal;
use crate::process::Process;
use crate::process::handle::read_bounded;

/// `/proc/PID/auxv` has some twenty entries of 16 bytes.
const AUXV_BYTES_MAX: u64 = 4096;
/// Key of the address of the sixteen random bytes on the stack (uapi/linux/auxvec.h).
const AT_RANDOM: u64 = 25;

/// The image of a process: what an execve replaces. To be taken before any of its addresses is looked up.
#[derive(Debug)]
pub struct Image {
    /// `/proc/PID/mem`: of the address space there is now, and of no later one (fs/proc/base.c, `mem_open`). Once that is given up, a read
    /// returns nothing (`mem_rw`).
    memory: File,
    /// The auxiliary vector: addresses that address-space randomization chose.
    auxv: Vec<u8>,
    /// An address that is mapped as long as the image lives.
    mapped: u64,
}

impl Image {
    /// The image of now.
    ///
    /// # Errors
    /// If it may not be read, or the process has ended.
    pub fn of(process: &Process) -> Result<Self, Refusal> {
        let memory = File::open(process.directory().join("mem")).map_err(|error| match error.kind() {
            std::io::ErrorKind::PermissionDenied => super::tracer::not_permitted(),
            _ => Refusal::Ended,
        })?;
        let auxv = auxv(process).ok_or(Refusal::Ended)?;
        let words = auxv.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect::<Vec<u64>>();
        let mapped = words.as_chunks::<2>().0.iter().find(|[key, _]| *key == AT_RANDOM).map_or(0, |[_, address]| *address);
        let image = Self { memory, auxv, mapped };
        image.check(process)?;
        Ok(image)
    }

    /// Makes sure that the process still executes it.
    ///
    /// # Errors
    /// [`Refusal::Replaced`] if it executes another program, [`Refusal::Ended`] if none any more.
    pub fn check(&self, process: &Process) -> Result<(), Refusal> {
        let now = auxv(process).ok_or(Refusal::Ended)?;
        let is_there = self.memory.read_at(&mut [0], self.mapped).is_ok_and(|bytes| bytes == 1);
        if is_there && now == self.auxv { Ok(()) } else { Err(Refusal::Replaced) }
    }
}

fn auxv(process: &Process) -> Option<Vec<u8>> {
    read_bounded(&process.directory().join("auxv"), AUXV_BYTES_MAX).ok().filter(|bytes| !bytes.is_empty())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::process::{Command, Stdio};

    use super::*;
    use crate::units::Pid;

    /// Without randomization, and by the same program: all addresses are as before.
    #[test]
    fn an_image_is_replaced_by_an_exec_of_the_same_program_at_the_same_addresses() {
        let script = "echo 1; read line; if [ \"$0\" = again ]; then exit; fi; exec setarch -R sh -c \"$1\" again";
        let mut shell = Command::new("setarch");
        shell.args(["-R", "sh", "-c", script, "first", script]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut shell = shell.spawn().unwrap();
        let (mut input, mut output) = (shell.stdin.take().unwrap(), BufReader::new(shell.stdout.take().unwrap()));
        let mut next = || output.read_line(&mut String::new()).unwrap();
        next();
        let process = Process::open(Pid(shell.id())).unwrap();
        let image = Image::of(&process).unwrap();
        assert_eq!(image.check(&process), Ok(()));
        input.write_all(b"\n").unwrap();
        next();
        assert_eq!(image.check(&process), Err(Refusal::Replaced));
        assert!(Image::of(&process).is_ok());
        input.write_all(b"\n").unwrap();
        shell.wait().unwrap();
        assert_eq!(image.check(&process), Err(Refusal::Ended));
    }
}
