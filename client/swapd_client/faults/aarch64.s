// The handler of SIGSEGV and SIGBUS on aarch64: handler.py has it as bytes, and describes it.
// Called as handler(signal in x0, siginfo in x1, context in x2).

handler:
    hint #34                        // bti c
    ldr x9, data
    ldr w10, [x1, #8]               // si_code: a signal from a process has no address
    cmp w10, #0
    b.le chain
    ldr x10, [x1, #16]              // si_addr
    ldp x11, x12, [x9]              // the table, and how many rows it has
next:
    cbz x12, chain
    ldp x13, x14, [x11]
    sub x13, x10, x13
    cmp x13, x14                    // lower: in this range
    b.lo found
    add x11, x11, #512
    sub x12, x12, #1
    b next
found:
    stp x0, x1, [sp, #-144]!        // from 32 on 64 bytes of the thread's name, then three iovecs
    str x2, [sp, #16]
    mov x0, #-100
    add x1, x9, #48
    add x2, sp, #32
    mov x3, #64
    mov x8, #78                     // readlinkat(AT_FDCWD, "/proc/thread-self")
    svc #0
    cmp x0, #0
    csel x0, xzr, x0, lt
    add x3, x11, #24
    ldr x4, [x11, #16]
    stp x3, x4, [sp, #96]
    add x3, sp, #32
    stp x3, x0, [sp, #112]
    ldp x3, x4, [x9, #72]
    stp x3, x4, [sp, #128]
    mov x0, #2
    add x1, sp, #96
    mov x2, #3
    mov x8, #66                     // writev(stderr)
    svc #0
    ldr x2, [sp, #16]
    ldp x0, x1, [sp], #144
chain:
    ldr x16, [x9, #16]
    cmp x16, #1
    b.hi call
    mov x11, x0                     // default or ignore: restore that
    mov x12, x1
    add x1, x9, #16
    mov x2, #0
    mov x3, #8
    mov x8, #134                    // rt_sigaction
    svc #0
    ldr w10, [x12, #8]
    cmp w10, #0
    b.gt done                       // repeat the faulting access
    mov x8, #172                    // getpid; a process sent it: send it again
    svc #0
    mov x13, x0
    mov x8, #178                    // gettid
    svc #0
    mov x1, x0
    mov x0, x13
    mov x2, x11
    mov x3, x12
    mov x8, #240                    // rt_tgsigqueueinfo
    svc #0
done:
    ret
call:
    br x16
    .balign 8
data:
