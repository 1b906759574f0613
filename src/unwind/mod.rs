//! `.eh_frame` to rows to blocks: the tables the BPF unwinder walks by. Pure functions, no root.
