/* The program that a C library's allocator is run in to see which of its instructions what kind of block passes.
 *
 * It stops, calls what its tracer put into the registers by then, and stops again: the tracer chooses the functions and their arguments
 * (tracer.rs), and finds the result in rax. No start-up code and no symbol of the C library is used, only its name is needed, so the
 * same file runs under every glibc: the dynamic loader has prepared the library by the time it jumps here. */
#ifndef __x86_64__
#error "the calling sequence is that of x86-64"
#endif

__asm__(".text\n"
        ".globl _start\n"
        ".type _start, @function\n"
        "_start:\n"
        "	and $-16, %rsp\n" /* as the ABI wants it at a call */
        "again:\n"
        "	int3\n"
        "	call *%rax\n"
        "	jmp again\n"
        ".size _start, . - _start\n"
        ".section .note.GNU-stack, \"\", @progbits\n"
        ".text\n");
