package launch

import (
	"bytes"
	"fmt"
	"io/fs"
	"path"
	"strings"
)

// state says why the kernel keeps a process that SIGKILL has not ended, using files under root: the
// state of the process, where it waits in the kernel, and what holds it.
func state(root fs.FS, pid int) string {
	read := func(name string) string {
		text, _ := fs.ReadFile(root, fmt.Sprintf("proc/%d/%s", pid, name)) // "" says nothing
		return string(text)
	}
	about := fmt.Sprintf("process %d has no state in /proc", pid)
	if letter := stateLetter(read("stat")); letter != "" {
		about = fmt.Sprintf("process %d is in state %s%s", pid, letter, map[string]string{
			"D": " (uninterruptible sleep)", "Z": " (it has ended)", "T": " (stopped)",
		}[letter])
	}
	if in := read("wchan"); in != "" && in != "0" {
		about += ", in " + in
	}
	if dir := frozen(root, read("cgroup")); dir != "" {
		about += fmt.Sprintf("; its cgroup /%s is frozen", dir)
	}
	if _, text, ok := strings.Cut(read("status"), "\nTracerPid:"); ok {
		if tracer := strings.Fields(text)[0]; tracer != "0" {
			about += fmt.Sprintf("; process %s traces it, as a debugger does: end that", tracer)
		}
	}
	return about
}

// stateLetter returns the state from the text of /proc/PID/stat, "" if there is none. The name
// before the state is in brackets, and may contain any bytes.
func stateLetter(stat string) string {
	rest := strings.Fields(stat[strings.LastIndexByte(stat, ')')+1:])
	if len(rest) == 0 {
		return ""
	}
	return rest[0]
}

// frozen returns the first frozen cgroup in the text of /proc/PID/cgroup, "" if there is none.
func frozen(root fs.FS, cgroups string) string {
	for controllers, in := range cgroupsIn(cgroups) {
		dir, file, word := path.Join("sys/fs/cgroup", in), "cgroup.freeze", "1"
		if strings.Contains(controllers, "freezer") { // version 1
			dir, file = path.Join("sys/fs/cgroup/freezer", in), "freezer.state"
			word = "FROZEN"
		}
		text, err := fs.ReadFile(root, path.Join(dir, file))
		if err == nil && string(bytes.TrimSpace(text)) == word {
			return dir
		}
	}
	return ""
}
