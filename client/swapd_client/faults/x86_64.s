# The handler of SIGSEGV and SIGBUS on x86-64: handler.py has it as bytes, and describes it.
# Called as handler(signal in rdi, siginfo in rsi, context in rdx).

    .intel_syntax noprefix
handler:
    endbr64
    push rdi
    push rsi
    push rdx
    mov r8, [rip + data]
    cmp dword ptr [rsi + 8], 0      # si_code: a signal from a process has no address
    jle chain
    mov r9, [rsi + 16]              # si_addr
    mov r10, [r8]                   # the table
    mov rcx, [r8 + 8]               # how many rows it has
next:
    test rcx, rcx
    jz chain
    mov rax, r9
    sub rax, [r10]
    cmp rax, [r10 + 8]              # lower: in this range
    jb found
    add r10, 512
    dec rcx
    jmp next
found:
    sub rsp, 112                    # 64 bytes of the thread's name, then three iovecs
    lea rdi, [r8 + 48]
    mov rsi, rsp
    mov edx, 64
    mov eax, 89                     # readlink("/proc/thread-self")
    syscall
    xor edx, edx
    test rax, rax
    cmovs rax, rdx
    lea rcx, [r10 + 24]
    mov [rsp + 64], rcx
    mov rcx, [r10 + 16]
    mov [rsp + 72], rcx
    mov [rsp + 80], rsp
    mov [rsp + 88], rax
    mov rcx, [r8 + 72]
    mov [rsp + 96], rcx
    mov rcx, [r8 + 80]
    mov [rsp + 104], rcx
    mov edi, 2
    lea rsi, [rsp + 64]
    mov edx, 3
    mov eax, 20                     # writev(stderr)
    syscall
    add rsp, 112
chain:
    pop rdx
    pop rsi
    pop rdi
    mov rax, [r8 + 16]
    cmp rax, 1
    ja call
    mov r9, rsi                     # default or ignore: restore that
    lea rsi, [r8 + 16]
    xor edx, edx
    mov r10d, 8
    mov eax, 13                     # rt_sigaction
    syscall
    cmp dword ptr [r9 + 8], 0
    jg done                         # repeat the faulting access
    mov r8, rdi                     # a process sent it: send it again
    mov eax, 39                     # getpid
    syscall
    mov rdi, rax
    mov eax, 186                    # gettid
    syscall
    mov rsi, rax
    mov rdx, r8
    mov r10, r9
    mov eax, 297                    # rt_tgsigqueueinfo
    syscall
done:
    ret
call:
    jmp rax
    .balign 8, 0xcc
data:
