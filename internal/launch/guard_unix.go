//go:build unix

package launch

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// guard is a shell that ends what a killed launcher leaves: whole process groups, where the kernel
// ends at most their leaders, and the directory of a build. A nil guard does nothing: without a
// shell there is none.
type guard struct {
	shell *exec.Cmd
	lines *os.File
}

// guardScript takes lines until the launcher closes them, or is gone: "+ GROUP" when a group has
// begun, "- GROUP" when it has ended, before its number may be another's, and "d DIRECTORY".
const guardScript = `groups= dir=
while read -r what which; do
	case $what in
	+) groups="$groups $which " ;;
	-) case $groups in
		*" $which "*) groups="${groups%% $which *}${groups#* $which }" ;;
		esac ;;
	d) dir=$which ;;
	esac
done
for group in $groups; do kill -KILL -"$group"; done
[ -z "$dir" ] || rm -rf "$dir"`

// guardTime bounds how long a guard that somebody has stopped holds up the launcher.
const guardTime = time.Second

// newGuard starts a guard in a session of its own, where no signal for the launcher reaches it, and
// without the launcher's environment, which has secrets.
func newGuard() *guard {
	read, write, err := os.Pipe()
	if err != nil {
		return nil
	}
	defer read.Close()
	shell := exec.Command("/bin/sh", "-c", guardScript)
	shell.Env, shell.Dir = []string{"PATH=" + os.Getenv("PATH")}, "/"
	shell.Stdin, shell.SysProcAttr = read, &syscall.SysProcAttr{Setsid: true}
	if shell.Start() != nil {
		write.Close()
		return nil
	}
	return &guard{shell, write}
}

// tell writes a line: nothing of a path that would be two. An error means that the guard was ended:
// the launcher goes on without it.
func (g *guard) tell(what string, which any) {
	line := fmt.Sprintln(what, which)
	if g != nil && strings.Count(line, "\n") == 1 {
		g.lines.SetWriteDeadline(time.Now().Add(guardTime))
		io.WriteString(g.lines, line)
	}
}

// close ends the guard.
func (g *guard) close() {
	if g != nil {
		g.lines.Close()
		within(guardTime, func() { g.shell.Wait() })
	}
}
