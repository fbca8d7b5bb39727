//go:build linux

package launch

import (
	"fmt"
	"io"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"github.com/euryale-ml/euryale/internal/testing/require"
)

func TestAKillForLackOfMemoryIsCalledOne(t *testing.T) {
	const v1 = "12:cpu,cpuacct:/a\n9:hugetlb,memory:/a/b\n0::/c\n"
	for _, test := range []struct{ about, cgroup, file string }{
		{"version 2", "0::/a/b\n", "sys/fs/cgroup/a/b/memory.events"},
		{"a container of version 2", "0::/../x\n", "sys/fs/cgroup/memory.events"},
		{"version 1", v1, "sys/fs/cgroup/memory/a/b/memory.oom_control"},
		{"a container of version 1", v1, "sys/fs/cgroup/memory/memory.oom_control"},
		{"the root cgroup", "0::/\n", "proc/vmstat"},
		{"no cgroups", "", "proc/vmstat"},
	} {
		root := fstest.MapFS{"proc/self/cgroup": {Data: []byte(test.cgroup)}}
		kills := func(n int) {
			root[test.file] = &fstest.MapFile{Data: fmt.Appendf(nil, "oom 9\noom_kill %d\n", n)}
		}
		kills(3)
		o := newOOM(root)
		killed := ending{Status: killedBy(syscall.SIGKILL)}
		require.Equal(t, fmt.Sprintf("%s: before any", test.about), o.explain(killed), "")
		kills(5)
		for _, e := range []ending{{Status: exits(1)}, {Status: killedBy(syscall.SIGTERM)},
			{Status: killedBy(syscall.SIGKILL), Asked: true}} {
			require.Equal(t, fmt.Sprintf("%s: %+v", test.about, e), o.explain(e), "")
		}
		for range 2 {
			if says := o.explain(killed); !strings.Contains(says, "out of memory") ||
				!strings.Contains(says, "/"+test.file) {
				t.Errorf("%s: %q", test.about, says)
			}
		}
		require.Equal(t, fmt.Sprintf("%s: two kills explain a third end", test.about),
			o.explain(killed), "")
	}
}

func TestAKillForLackOfMemoryIsToldInTheVerdict(t *testing.T) {
	const says = "out of memory: 1"
	e := ending{Status: killedBy(syscall.SIGKILL), Memory: says}
	f := verdict([]ending{e})
	for _, text := range []string{e.how(), f.Error()} {
		require.Check(t, strings.Contains(text, "signal: killed, "+says), "%q lacks %q", text, says)
	}
	root := fstest.MapFS{"proc/vmstat": {Data: []byte("oom_kill 3\n")}}
	job := Job{Program: "/bin/sh", Args: []string{"-c", "kill -9 $$"}, Ranks: 1,
		Stdout: io.Discard, Stderr: io.Discard, times: defaultTimes()}
	w := newWatch(job, job.environment(0, newMeeting(1, "127.0.0.1", "1")))
	w.oom = newOOM(root)
	root["proc/vmstat"] = &fstest.MapFile{Data: []byte("oom_kill 4\n")}
	require.Fails(t, "a rank is killed for lack of memory", w.attempt(t.Context(), 0),
		"out of memory: the")
}
