//go:build linux

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// slurm is a cluster of Slurm, with a node on each of several machines.
type slurm struct {
	*testing.T
	machines []*proctest.Namespace
	dir      string   // where jobs run
	env      []string // of its commands
}

// slurmConf has a place for the directory, for each node and for the number of nodes.
const slurmConf = `ClusterName=test
SlurmctldHost=node-0(%[2]s)
AuthType=auth/munge
AuthInfo=socket=%[1]s/munge.socket
CryptoType=crypto/munge
SlurmUser=root
MailProg=/bin/true
StateSaveLocation=%[1]s/controller
SlurmdSpoolDir=%[1]s/spool-%%n
SlurmctldPidFile=%[1]s/slurmctld.pid
SlurmdPidFile=%[1]s/slurmd-%%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SchedulerParameters=sched_interval=1,bf_interval=1,requeue_delay=1
JobRequeue=1
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
KillWait=5
SlurmdParameters=config_overrides
`

// newSlurm starts a cluster. Without Slurm the test is skipped.
func newSlurm(t *testing.T, nodes int) slurm {
	t.Helper()
	path := os.Getenv("PATH") + ":/usr/sbin"
	t.Setenv("PATH", path)
	for _, command := range []string{"munged", "slurmctld", "slurmd", "sbatch"} {
		if _, err := exec.LookPath(command); err != nil {
			t.Skipf("needs munge and slurm-wlm: %v", err)
		}
	}
	s := slurm{t, proctest.Machines(t, nodes, proctest.Wire{}), t.TempDir(), nil}
	for dir := s.dir; dir != "/" && dir != os.TempDir(); dir = filepath.Dir(dir) {
		require.NoError(t, os.Chmod(dir, 0o755)) // as munged wants it
	}
	require.NoError(t, os.Mkdir(filepath.Join(s.dir, "controller"), 0o755))
	conf := fmt.Sprintf(slurmConf, s.dir, s.machines[0].Addr)
	for i, m := range s.machines {
		conf += fmt.Sprintf("NodeName=node-%d NodeAddr=%s NodeHostname=node-%[1]d CPUs=4\n", i,
			m.Addr)
		require.NoError(t, os.Mkdir(filepath.Join(s.dir, fmt.Sprint("spool-node-", i)), 0o755))
	}
	conf += "PartitionName=all Nodes=ALL Default=YES State=UP\n"
	require.NoError(t, os.WriteFile(filepath.Join(s.dir, "slurm.conf"), []byte(conf), 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(s.dir, "cgroup.conf"),
		[]byte("CgroupPlugin=cgroup/v1\n"), 0o644))
	key := filepath.Join(s.dir, "munge.key")
	require.NoError(t, os.WriteFile(key, []byte(strings.Repeat(secret, 32)), 0o400))
	s.env = append(os.Environ(), "SLURM_CONF="+filepath.Join(s.dir, "slurm.conf"))
	file := func(name string) string {
		return "--" + name + "=" + filepath.Join(s.dir, "munge."+name)
	}
	s.daemon(0, "munged", "-F", "--force", "--key-file="+key, file("socket"), file("seed-file"),
		file("pid-file"), file("log-file"))
	s.until("munge answers", func() bool {
		return exec.Command("munge", "-n", "-S", filepath.Join(s.dir, "munge.socket")).Run() == nil
	})
	s.daemon(0, "slurmctld", "-D")
	for i := range s.machines {
		s.daemon(i, "slurmd", "-D", "-N", fmt.Sprint("node-", i))
	}
	s.until("all nodes are idle", func() bool {
		return strings.TrimSpace(s.say("sinfo", "-h", "-o", "%T %D")) == fmt.Sprint("idle ", nodes)
	})
	return s
}

// asNode has a daemon see its node's name, and a place for cgroups, which Slurm looks for.
const asNode = `hostname "$0" && mount -t tmpfs none /sys/fs/cgroup && exec "$@"`

// daemon starts a daemon on a machine, until the end of the test.
func (s slurm) daemon(machine int, name string, args ...string) *proctest.Program {
	s.Helper()
	cmd := exec.Command("unshare", append([]string{"--uts", "sh", "-c", asNode,
		fmt.Sprint("node-", machine), name}, args...)...)
	cmd.Env = s.env
	p := proctest.Launch(s.T, s.machines[machine].Command(cmd))
	s.Cleanup(func() {
		if s.Failed() {
			s.Logf("%s on machine %d:\n%s", name, machine, p.Output())
		}
	})
	return p
}

// say runs a command of Slurm on the first machine, and returns what it prints.
func (s slurm) say(name string, args ...string) string {
	s.Helper()
	cmd := exec.Command(name, args...)
	cmd.Env = s.env
	cmd = s.machines[0].Command(cmd)
	cmd.Dir = s.dir
	out, _ := cmd.CombinedOutput() // what is missing the test says
	return string(out)
}

// until waits for something.
func (s slurm) until(what string, holds func() bool) {
	s.Helper()
	for end := time.Now().Add(4 * long); !holds(); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			s.Fatalf("%s: not after %v:\n%s", what, 4*long, s.say("scontrol", "show", "jobs"))
		}
	}
}

// submit starts a script, and returns the job's number and the file of its output.
func (s slurm) submit(script string, args ...string) (job, output string) {
	s.Helper()
	file := filepath.Join(s.dir, "job.sbatch")
	require.NoError(s, os.WriteFile(file, []byte(script), 0o755))
	said := s.say("sbatch", append(args, file)...)
	number := regexp.MustCompile(`Submitted batch job (\d+)`).FindStringSubmatch(said)
	require.That(s, number != nil, "sbatch says %q", said)
	return number[1], filepath.Join(s.dir, "slurm-"+number[1]+".out")
}

// says waits for something in a file.
func (s slurm) says(file, pattern string) string {
	s.Helper()
	text := []byte(nil)
	defer func() {
		if s.Failed() {
			s.Logf("%s:\n%s", filepath.Base(file), text)
		}
	}()
	s.until(pattern, func() bool {
		text, _ = os.ReadFile(file)
		return regexp.MustCompile(pattern).Match(text)
	})
	return string(text)
}
