//go:build linux

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// recipe returns the commands of a section of docs/cluster.md.
func recipe(t *testing.T, section string) string {
	t.Helper()
	page := require.Value(os.ReadFile("../../docs/cluster.md"))(t)
	_, rest, found := strings.Cut(string(page), "\n## "+section+"\n")
	rest, _, _ = strings.Cut(rest, "\n## ")
	_, rest, _ = strings.Cut(rest, "```sh\n")
	text, _, closed := strings.Cut(rest, "```\n")
	require.That(t, found && closed && strings.Count(text, "\n") <= 10, "the recipe %s is %q",
		section, text)
	return text
}

// kitchen makes a directory have what recipes use: the command, and the program train, digits with
// more flags. It returns the PATH of the command.
func kitchen(t *testing.T, dir, euryale, program, flags string) (path string) {
	t.Helper()
	train := fmt.Sprintf("#!/bin/sh\nexec %s %s \"$@\"\n", program, flags)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "train"), []byte(train), 0o755))
	bin := filepath.Join(dir, "bin")
	require.NoError(t, os.Mkdir(bin, 0o755))
	require.NoError(t, os.Symlink(euryale, filepath.Join(bin, "euryale")))
	return "PATH=" + bin + ":" + os.Getenv("PATH")
}

// slurmKitchen are two nodes of Slurm with what the recipe uses, the program digits, and the hash
// of a training there.
func slurmKitchen(t *testing.T) (s slurm, program, want string) {
	t.Helper()
	if !full() {
		t.Skip("set EURYALE_FULL=1")
	}
	const epochs = "-epochs=100"
	s, program = newSlurm(t, 2), built(t, digits)
	s.env = append(s.env, kitchen(t, s.dir, command(t).Path, program, epochs), actAsEuryale+"=1",
		"EURYALE_TIMEOUT=20")
	return s, program, elasticHash(t, program, epochs)
}

// TestTheRecipeOfSlurm: by Slurm's daemons, on two nodes. A rank is killed; the job reaches its
// time limit, is requeued, and resumes; a node is told to end, and lost.
func TestTheRecipeOfSlurm(t *testing.T) {
	s, _, want := slurmKitchen(t)
	script := recipe(t, "Slurm")
	ends := func(s slurm, out string, says ...string) {
		t := s.T
		text := s.says(out, hash.String())
		require.Check(t, hash.FindString(text) == want, "it ends with %s, want %s",
			hash.FindString(text), want)
		for _, what := range says {
			require.Check(t, regexp.MustCompile(what).MatchString(text), "it does not say %q:\n%s",
				what, text)
		}
		require.NoError(t, os.RemoveAll(filepath.Join(s.dir, "state")))
	}
	t.Run("a rank is killed", func(t *testing.T) {
		s.T = t
		_, out := s.submit(script, "--chdir="+s.dir)
		s.says(out, `epoch 9/`)
		kill(t, []int{s.machines[1].Ranks(t)[2]})
		ends(s, out, `process 2 has ended \(signal: killed\): process 4 takes its place`)
	})
	t.Run("the time limit is reached", func(t *testing.T) {
		s.T = t
		job, out := s.submit(script, "--chdir="+s.dir, "--time=1", "--signal=TERM@45")
		ends(s, out, `(?s)Exited with exit code 143.*epoch \d\d`)
		said := s.say("scontrol", "show", "job", job)
		require.Check(t, strings.Contains(said, "Restarts=1"), "it is not queued again:\n%s", said)
	})
	t.Run("a node is lost", func(t *testing.T) {
		s.T = t
		_, out := s.submit(script, "--chdir="+s.dir)
		s.says(out, `epoch 9/`)
		s.machines[1].Cut(t)
		s.machines[1].Signal(t, syscall.SIGKILL)
		ends(s, out, `host 1 at \S+ is lost`)
	})
}

// TestSlurmStartsRanks: by srun, on two nodes.
func TestSlurmStartsRanks(t *testing.T) {
	if testing.Short() {
		t.Skip("it starts Slurm's daemons")
	}
	s := newSlurm(t, 2)
	_, out := s.submit("#!/bin/sh\nexport EURYALE_TOKEN="+secret+"\nsrun --ntasks-per-node=2 "+
		built(t, "examples/allreduce")+"\n", "--chdir="+s.dir, "--nodes=2")
	s.says(out, `(?s)(the sum of all is \[10 100 1000\].*){4}`)
}

// TestSlurmJobsOfOtherKinds: an array, of which each job has a node; a heterogeneous job, of which
// one step has all components; and one that is queued again while a node is drained.
func TestSlurmJobsOfOtherKinds(t *testing.T) {
	s, program, want := slurmKitchen(t)
	script := recipe(t, "Slurm")
	ends := func(s slurm, out string) {
		got := hash.FindString(s.says(out, hash.String()))
		require.Check(s, got == want, "%s ends with %s, want %s", filepath.Base(out), got, want)
	}
	t.Run("an array", func(t *testing.T) {
		s.T = t
		each := strings.ReplaceAll(script, " state\n", " state-$SLURM_ARRAY_TASK_ID\n")
		require.That(t, each != script, "the recipe names no checkpoint:\n%s", script)
		_, out := s.submit(each, "--chdir="+s.dir, "--nodes=1", "--array=0-2")
		for i := range 3 {
			ends(s, strings.TrimSuffix(out, ".out")+fmt.Sprintf("_%d.out", i))
		}
	})
	t.Run("a heterogeneous job", func(t *testing.T) {
		s.T = t
		const components = "#!/bin/sh\n#SBATCH --nodes=1 --ntasks=1\n#SBATCH hetjob\n" +
			"#SBATCH --nodes=1 --ntasks=2\nexport EURYALE_TOKEN=" + secret +
			"\nsrun --het-group=0,1 "
		_, out := s.submit(components+program+" -epochs=2\n", "--chdir="+s.dir)
		s.says(out, "ranks=3 backend=tcp")
		_, out = s.submit(strings.Replace(components, "=2\n", "=1\n", 1)+
			"euryale run --elastic -n 2 ./train -elastic\n", "--chdir="+s.dir)
		ends(s, out)
	})
	t.Run("a node is drained", func(t *testing.T) {
		s.T = t
		node := func(state string) {
			s.say("scontrol", "update", "nodename=node-1", "state="+state, "reason=test")
		}
		job, out := s.submit(script, "--chdir="+s.dir)
		s.says(out, `epoch 9/`)
		node("drain")
		s.says(out, `epoch 15/`)
		s.say("scancel", "--signal=TERM", job)
		s.until("it waits for the node", func() bool {
			said := s.say("squeue", "-h", "-o", "%T %r", "-j", job)
			return strings.Contains(said, "PENDING") && !strings.Contains(said, "BeginTime")
		})
		text := string(require.Value(os.ReadFile(out))(t))
		require.Check(t, hash.FindString(text) == "", "it has ended before:\n%s", text)
		node("resume")
		ends(s, out)
		said := s.say("scontrol", "show", "job", job)
		require.Check(t, strings.Contains(said, "Restarts=1"), "it is not queued again:\n%s", said)
	})
}

// onMachines are two machines with what recipes use, and what a training there ends with.
func onMachines(t *testing.T, n int) (machines []*proctest.Namespace, dir, path, want string) {
	t.Helper()
	if !full() {
		t.Skip("set EURYALE_FULL=1")
	}
	machines, dir = proctest.Machines(t, n, proctest.Wire{}), t.TempDir()
	program := built(t, digits)
	return machines, dir, kitchen(t, dir, command(t).Path, program, "-epochs=60"),
		elasticHash(t, program, "-epochs=60")
}

// cooked starts a script on a machine.
func cooked(t *testing.T, m *proctest.Namespace, dir, path, script string,
	environ ...string) *proctest.Program {
	t.Helper()
	cmd := exec.Command("sh", "-c", script)
	cmd.Env = append(os.Environ(), path, actAsEuryale+"=1", "EURYALE_TIMEOUT=20")
	cmd.Env = append(cmd.Env, environ...)
	cmd = m.Command(cmd)
	cmd.Dir = dir
	return proctest.Launch(t, cmd)
}

// TestTheRecipeOfMPI: by the launchers of Open MPI and MPICH, on two machines.
func TestTheRecipeOfMPI(t *testing.T) {
	machines, dir, path, want := onMachines(t, 2)
	script := strings.NewReplacer("-H node-0", "-H "+machines[0].Addr, "node-1",
		machines[1].Addr).Replace(recipe(t, "MPI"))
	options := regexp.MustCompile(`mpirun -H (\S+):1,(\S+):1 .*\n`)
	shell := proctest.Shell(t, machines)
	for name, launcher := range map[string]string{
		"mpirun.openmpi": "mpirun.openmpi --mca plm_rsh_agent " + shell + " --mca " +
			"oob_tcp_if_include eth0 -H $1:1,$2:1 -x EURYALE_TOKEN -x MASTER_ADDR " +
			"-x MASTER_PORT \\\n",
		"mpiexec.hydra": "mpiexec.hydra -launcher-exec " + shell + " -hosts $1,$2 -ppn 1 \\\n",
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := exec.LookPath(name); err != nil {
				t.Skip(err)
			}
			job := cooked(t, machines[0], dir, path, options.ReplaceAllString(script, launcher),
				"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1")
			if !job.Says(regexp.MustCompile(`epoch 9/`), long) {
				t.Fatalf("no training:\n%s", job.Output())
			}
			kill(t, []int{machines[1].Ranks(t)[2]})
			err := job.Ends(t, 2*long)
			require.Check(t, err == nil && hash.FindString(job.Output()) == want &&
				strings.Contains(job.Output(), "takes its place"), "%v, want %s:\n%s", err, want,
				job.Output())
			require.NoError(t, os.RemoveAll(filepath.Join(dir, "state")))
		})
	}
}

// TestTheRecipeOfBareHosts: by sshd on two machines, of which one is lost.
func TestTheRecipeOfBareHosts(t *testing.T) {
	s := newSite(t, 2, proctest.Wire{}, nil)
	dir, program := t.TempDir(), built(t, digits)
	path := kitchen(t, dir, s.euryale, program, "-epochs=60")
	want := elasticHash(t, program, "-epochs=60")
	script := strings.NewReplacer("node-0", s.hosts[0].Addr, "node-1", s.hosts[1].Addr).Replace(
		recipe(t, "Bare hosts"))
	job := cooked(t, s.user, dir, strings.Replace(path, "PATH=", "PATH="+s.ssh.Path+":", 1), script,
		"TEST_SSH_OPTIONS=", "TEST_SSH_KEY=authorized")
	if !job.Says(regexp.MustCompile(`epoch 9/`), long) {
		t.Fatalf("no training:\n%s", job.Output())
	}
	s.hosts[1].Cut(t)
	s.hosts[1].Signal(t, syscall.SIGKILL)
	err := job.Ends(t, 2*long)
	require.Check(t, err == nil && hash.FindString(job.Output()) == want &&
		strings.Contains(job.Output(), "is lost"), "%v, want %s:\n%s", err, want, job.Output())
	s.hosts[1].Mend(t)
}

// ofMPIOperator are the variables that the MPI Operator gives the pod of a launcher of Open MPI.
var ofMPIOperator = []string{"K_MPI_JOB_ROLE=launcher", "OMPI_MCA_orte_keep_fqdn_hostnames=true",
	"OMPI_MCA_orte_default_hostfile=/etc/mpi/hostfile", "OMPI_ALLOW_RUN_AS_ROOT=1",
	"OMPI_MCA_plm_rsh_args=-o ConnectionAttempts=10", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
	"NVIDIA_VISIBLE_DEVICES=", "NVIDIA_DRIVER_CAPABILITIES="}

// TestTheManifestOfAnMPIJobRuns: the launcher's pod, with the names of workers, the hostfile and
// the variables of the operator, and the ssh of its images. A worker's pod is deleted and made
// again.
func TestTheManifestOfAnMPIJobRuns(t *testing.T) {
	s := newSite(t, 2, proctest.Wire{}, nil)
	dir, program := t.TempDir(), built(t, digits)
	path := kitchen(t, dir, s.euryale, program, "-epochs=200")
	want := elasticHash(t, program, "-epochs=200")
	text := string(require.Value(os.ReadFile("../../examples/cluster/elastic-mpijob.yaml"))(t))
	names, hosts, file := "", "", filepath.Join(dir, "hostfile")
	for i, h := range s.hosts {
		name := fmt.Sprintf("train-worker-%d.train.default.svc", i)
		names += fmt.Sprintf("echo %s %s >>/etc/hosts; ", h.Addr, name)
		hosts += name + " slots=2\n"
	}
	require.NoError(t, os.WriteFile(file, []byte(hosts), 0o444))
	found := commandOf.FindStringSubmatch(text)
	words := strings.NewReplacer(",", "", "program", "./train", "/etc/mpi/hostfile", file,
		"/state/run1", filepath.Join(dir, "state")).Replace(found[1] + " " + found[2])
	job := cooked(t, s.user, dir, strings.Replace(path, "PATH=", "PATH="+s.ssh.Path+":", 1),
		names+"exec "+words, append([]string{"TEST_SSH_KEY=authorized",
			"TEST_SSH_OPTIONS=-o StrictHostKeyChecking=no"}, ofMPIOperator...)...)
	await := func(what string) {
		t.Helper()
		require.That(t, job.Says(regexp.MustCompile(what), 2*long), "it does not say %q:\n%s", what,
			job.Output())
	}
	await(`epoch 9/`)
	s.hosts[1].Signal(t, syscall.SIGKILL)
	await(`host train-worker-1\S* is lost`)
	s.ssh.Serve(t, s.hosts[1])
	await(`host train-worker-1\S* takes part`)
	err := job.Ends(t, 4*long)
	end := hash.FindString(job.Output())
	require.Check(t, err == nil && end == want, "%v, it ends with %s, want %s:\n%s", err, end, want,
		job.Output())
}

// pods are what controllers make of a manifest of examples/cluster: the command of a container,
// with the variables that controllers add, and the name of pod 0, %d for the number of a pod.
var pods = map[string]struct {
	first, more string
}{
	"elastic.yaml":        {"train-0.train", "JOB_COMPLETION_INDEX=%d"},
	"elastic-jobset.yaml": {"train-ranks-0-0.train", "JOB_COMPLETION_INDEX=%d JOBSET_NAME=train"},
	"elastic-lws.yaml": {"train-0.train.default", "LWS_WORKER_INDEX=%d LWS_GROUP_SIZE=4 " +
		"LWS_LEADER_ADDRESS=train-0.train.default"},
	"elastic-trainjob.yaml": {"train-node-0-0.train", "JOB_COMPLETION_INDEX=%d " +
		"PET_NODE_RANK=%[1]d PET_NNODES=4 PET_NPROC_PER_NODE=2 " +
		"PET_MASTER_ADDR=train-node-0-0.train PET_MASTER_PORT=29500"},
}

var (
	commandOf = regexp.MustCompile(`(?m)^ *command: \[(.*)\]\n *args: \[(.*)\]`)
	variables = regexp.MustCompile(`- name: ([A-Z_]+)\n *value: "?([^"\n]+)`)
)

// TestTheManifestsRun: each pod is a process on a machine, with exactly the command and variables
// that the manifest and its controller give. One is deleted and made again, and one is killed.
func TestTheManifestsRun(t *testing.T) {
	machines, dir, path, want := onMachines(t, 4)
	for name, c := range pods {
		t.Run(name, func(t *testing.T) {
			text := string(require.Value(os.ReadFile("../../examples/cluster/" + name))(t))
			found := commandOf.FindStringSubmatch(text)
			words := strings.NewReplacer(",", "", `"`, "", "program", "./train", "/state/run1",
				filepath.Join(t.TempDir(), "state")).Replace(found[1] + " " + found[2])
			pod := func(n int) *proctest.Program {
				environ := append(strings.Fields(fmt.Sprintf(c.more, n)), "EURYALE_TOKEN="+secret)
				for _, v := range variables.FindAllStringSubmatch(text, -1) {
					environ = append(environ, v[1]+"="+v[2])
				}
				names := fmt.Sprintf("echo %s %s >>/etc/hosts; exec ", machines[0].Addr, c.first)
				return cooked(t, machines[n], dir, path, names+words, environ...)
			}
			all := []*proctest.Program{pod(0), pod(1), pod(2), pod(3)}
			await := func(what string) {
				t.Helper()
				require.That(t, all[0].Says(regexp.MustCompile(what), long),
					"it does not say %q:\n%s", what, all[0].Output())
			}
			await(`epoch 9/`)
			require.NoError(t, all[2].Cmd.Process.Signal(syscall.SIGTERM))
			await(`host 2 at \S+ was told to end`)
			require.Fails(t, "the pod ends well", all[2].Ends(t, long), "143")
			all[2] = pod(2)
			await(`host 2 at \S+ takes part`)
			machines[3].Signal(t, syscall.SIGKILL)
			await(`host 3 at \S+ is lost`)
			all[3].Ends(t, long)
			all[3] = pod(3)
			for n, p := range all {
				require.Report(t, p.Ends(t, 2*long))
				end := hash.FindString(p.Output())
				require.Check(t, n > 0 || end == want, "it ends with %s, want %s:\n%s", end, want,
					p.Output())
			}
		})
	}
}
