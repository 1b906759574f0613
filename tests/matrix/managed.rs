//! Frames of Java and Python in a guest, in few modes and rounds: emulation takes a hundred times as long as a CPU. The tests of
//! `crate::managed` cover more on the machine itself.

use crate::managed::{java, python, python_truth, truth};
use crate::support::{bpf, serial};

/// Every JDK's stacks, with these options and so many rounds before those that are compared.
fn compare_java(options: &[&str], warm: u32) {
    if bpf().is_none() {
        return;
    }
    let _one = serial();
    for java in java::all() {
        let stacks = truth::compare(&java, options, &[], warm, 4);
        assert!(stacks >= 100, "{stacks}");
    }
}

#[test]
#[ignore = "for another architecture: scripts/kernel-matrix.sh arm64"]
fn java_stacks_of_the_interpreter_are_those_that_jvmti_says() {
    compare_java(&["-Xint"], 2);
}

// Which methods are compiled, and when, is not left to the JVM.

#[test]
#[ignore = "for another architecture: scripts/kernel-matrix.sh arm64"]
fn java_stacks_of_the_first_compiler_are_those_that_jvmti_says() {
    compare_java(&["-XX:TieredStopAtLevel=1", "-Xbatch"], 300);
}

#[test]
#[ignore = "for another architecture: scripts/kernel-matrix.sh arm64"]
fn java_stacks_of_the_second_compiler_are_those_that_jvmti_says() {
    compare_java(&["-XX:-TieredCompilation", "-XX:CompileThreshold=100", "-Xbatch"], 300);
}

#[test]
#[ignore = "for another architecture: scripts/kernel-matrix.sh arm64"]
fn python_stacks_are_those_that_the_interpreter_says() {
    if bpf().is_none() {
        return;
    }
    let _one = serial();
    for python in python::all() {
        let stacks = python_truth::compare(&python, &[], 2);
        assert!(stacks >= 400, "{stacks}");
    }
}
