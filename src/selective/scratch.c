/* The program in which a C library's allocator runs, to determine which of its instructions each kind of block reaches.
 *
 * It stops, calls the function that its tracer has put into the registers, and stops again: the tracer chooses the functions and their
 * arguments (tracer.rs), and finds the result in rax. No start-up code and no symbol of the C library is used, only its name is needed, so
 * the same file runs under every glibc: the dynamic loader has prepared the library by the time it jumps here. */
#ifndef __x86_64__
#error "the calling sequence is that of x86-64"
#endif

__asm__(".text\n"
        ".globl _start\n"
        ".type _start, @function\n"
        "_start:\n"
        "	and $-16, %rsp\n" /* as the ABI requires at a call */
        "again:\n"
        "	int3\n"
        "	call *%rax\n"
        "	jmp again\n"
        ".size _start, . - _start\n"
        ".section .note.GNU-stack, \"\", @progbits\n"
        ".text\n");
