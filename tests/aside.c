/* A fork whose child is at once an orphan. The process between the two copies no page tables: it
 * has this process's memory (vfork), and only forks. */

#include <errno.h>
#include <sys/wait.h>
#include <unistd.h>

/* Returns 0 in the new process, 1 in this one, -1 with errno if there is none. */
int fork_aside(void)
{
    int status;
    pid_t between = vfork();

    if (between == 0) {
        pid_t made = fork();
        if (made == 0)
            return 0; /* on its own copy of the stack */
        _exit(made < 0 ? errno : 0);
    }
    if (between < 0)
        return -1;
    while (waitpid(between, &status, 0) < 0)
        if (errno != EINTR)
            return -1;
    errno = WIFEXITED(status) ? WEXITSTATUS(status) : EAGAIN;
    return errno ? -1 : 1;
}
