//go:build linux

package main

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/euryale-ml/euryale/internal/hierarchy"
	"github.com/euryale-ml/euryale/internal/testing/contracts"
	"github.com/euryale-ml/euryale/internal/testing/proctest"
	"github.com/euryale-ml/euryale/internal/testing/require"
)

// patience is the EURYALE_TIMEOUT of jobs that lose a machine.
const patience = 3 * time.Second

// full reports whether all cases are tested, and not a sample of them.
func full() bool { return os.Getenv("EURYALE_FULL") == "1" }

// Two launchers, each with two of the four ranks, as on two machines, by the script of
// examples/cluster. That they share this one is known to the ranks, which here take sockets all the
// same.
func TestLaunchersShareAJob(t *testing.T) {
	ln := require.Value(net.Listen("tcp", "127.0.0.1:0"))(t)
	meeting := ln.Addr().String()
	ln.Close()
	bin := t.TempDir()
	require.NoError(t, os.Symlink(command(t).Path, filepath.Join(bin, "euryale")))
	var launchers []*proctest.Program
	for m := range 2 {
		cmd := exec.Command("sh", "../../examples/cluster/two-machines.sh", fmt.Sprint(m), meeting,
			"euryale", "bench", "--backend=tcp", "--min=1K", "--max=4K", "--factor=4", "--iters=5")
		cmd.Env = append(command(t).Env, "EURYALE_TOKEN="+secret, "PATH="+bin+":"+os.Getenv("PATH"))
		launchers = append(launchers, proctest.Launch(t, cmd))
	}
	for m, l := range launchers {
		if err := l.Ends(t, long); err != nil {
			t.Errorf("launcher %d: %v\n%s", m, err, l.Output())
		}
	}
	if out := launchers[0].Output(); !strings.Contains(out, "[0] # ranks: 4 processes") {
		t.Errorf("launcher 0 printed\n%s", out)
	}
}

const secret = "0123456789abcdef0123456789abcdef"

// built builds a program with tags, for tests that train on machines.
func built(t *testing.T, folder string, tags ...string) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), filepath.Base(folder))
	args := []string{"build", "-ldflags=-s -w", "-o", program}
	if len(tags) > 0 { // else the tags of this build, whose packages are compiled
		args = append(args, "-tags="+strings.Join(tags, ","))
	}
	cmd := exec.Command("go", append(args, "../../"+folder)...)
	out, err := cmd.CombinedOutput()
	require.That(t, err == nil, "build %s: %v\n%s", folder, err, out)
	return program
}

// digits is the program that most of these tests train with.
const digits = "examples/digits"

// job is one of several machines, each with a launcher of two ranks.
type job struct {
	machines  []*proctest.Namespace
	launchers []*proctest.Program
}

// startJob starts a program on machines.
func startJob(t *testing.T, machines []*proctest.Namespace, program ...string) job {
	t.Helper()
	j := job{machines: machines}
	for i, m := range machines {
		args := []string{"run", fmt.Sprint("--nnodes=", len(machines)),
			fmt.Sprint("--node-rank=", i), "--rendezvous=" + machines[0].Addr + ":29511", "-n", "2"}
		cmd := command(t, append(args, program...)...)
		cmd.Env = append(cmd.Env, "EURYALE_TOKEN="+secret, fmt.Sprint("EURYALE_TIMEOUT=", patience))
		j.launchers = append(j.launchers, proctest.Launch(t, m.Command(cmd)))
	}
	return j
}

// succeeds waits for the launchers, and returns what the first one has said.
func (j job) succeeds(t *testing.T) string {
	t.Helper()
	for i, l := range j.launchers {
		if err := l.Ends(t, long); err != nil {
			t.Errorf("machine %d: %v\n%s", i, err, l.Output())
		}
	}
	for _, m := range j.machines {
		m.IsEmpty(t)
	}
	return j.launchers[0].Output()
}

// kill kills ranks of one machine. All are found first: the loss of one ends the others.
func (j job) kill(t *testing.T, ranks ...int) {
	t.Helper()
	pids := j.machines[ranks[0]/2].Ranks(t)
	for i, rank := range ranks {
		pid, found := pids[rank]
		require.That(t, found, "there is no rank %d to kill", rank)
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil &&
			(i == 0 || err != syscall.ESRCH) {
			t.Fatalf("kill rank %d: %v", rank, err)
		}
	}
}

// Four machines of two ranks, under the variables of each launcher: eight ranks join, started by it
// or by euryale run on each machine, or are refused by the launcher's name.
func TestMachinesJoinByWhatLaunchersSay(t *testing.T) {
	program := built(t, "examples/gradient")
	for _, c := range contracts.All() {
		sampled := slices.Contains([]string{"SkyPilot", "AWS Batch", "Slurm", "DMLC"}, c.Name)
		if !full() && !sampled {
			continue
		}
		t.Run(c.Name, func(t *testing.T) {
			machines := proctest.Machines(t, 4, proctest.Wire{})
			if !c.Machines {
				joinsOrNames(t, c, machines, 2, program)
			}
			if c.Name != "euryale run" {
				joinsOrNames(t, c, machines, 1, command(t).Path, "run", "-n", "2", program)
			}
		})
	}
}

// joinsOrNames starts a command under the variables of a launcher, once or twice on each machine.
func joinsOrNames(t *testing.T, c contracts.Case, machines []*proctest.Namespace, each int,
	args ...string) {
	t.Helper()
	var all []*proctest.Program
	for i, m := range machines {
		for local := range each {
			cmd := exec.Command(args[0], args[1:]...)
			cmd.Env = append(c.Of(i, len(machines), local, each), "PATH="+os.Getenv("PATH"),
				"HOME="+t.TempDir(), "EURYALE_TIMEOUT=20", "EURYALE_TOKEN="+secret,
				actAsEuryale+"=1")
			all = append(all, proctest.Launch(t, m.Command(cmd)))
		}
	}
	sums := 0
	for _, p := range all {
		err := p.Ends(t, long)
		sums += strings.Count(p.Output(), "loss 1296 gradient 576")
		named := strings.Contains(p.Output(), "is the sign of a job that")
		if c.Refused && (err == nil || !named) || !c.Refused && err != nil {
			t.Errorf("%s: %v\n%s", args, err, p.Output())
		}
	}
	require.Check(t, c.Refused || sums == 8, "%s: %d ranks have the sum, not 8", args, sums)
}

func TestMachinesRunABenchmark(t *testing.T) {
	machines := proctest.Machines(t, 2, proctest.Wire{})
	out := startJob(t, machines, command(t).Path, "bench", "--min=4", "--max=4M", "--factor=32",
		"--iters=5").succeeds(t)
	require.Check(t, strings.Contains(out, "[0] # ranks: 4 processes") &&
		strings.Contains(out, "backend tcp"), "machine 0 printed\n%s", out)
}

// Links between machines are measured where they are, inside in shared memory, and explained
// afterwards.
func TestMachinesTuneTheirLinks(t *testing.T) {
	file := noTuning(t)
	machines := proctest.Machines(t, 2, proctest.Wire{})
	startJob(t, machines, command(t).Path, "bench", "--tune", "--min=64K", "--max=1M",
		"--factor=16", "--time=1ms").succeeds(t)
	kept, found, err := hierarchy.Measured("host", hierarchy.Grid(2, 2),
		false)
	require.That(t, err == nil && found && strings.Contains(kept.Source, "4 processes, tcp"),
		"%s keeps %+v, %v", file, kept, err)
	code, out, stderr := explain("allreduce 64M --topology 2x2")
	for _, want := range []string{"links         " + kept.Links.String() + "\n", "measured: " +
		kept.Source, "67.1 MB between machines from each rank"} {
		require.Check(t, code == 0 && strings.Contains(out, want), "code %d, %s, no %q in\n%s",
			code, stderr, want, out)
	}
}

// trained is the last line of the program.
var trained = regexp.MustCompile(
	`(?m)^(?:\[0\] )?(accuracy=0\.9\d+) ranks=\d+ backend=(\S+) (params=\w{64})$`)

// learned returns what the program ends with on a backend. It sees by itself that ranks are alike.
func learned(t *testing.T, out, backend string) string {
	t.Helper()
	end := trained.FindStringSubmatch(out)
	require.That(t, end != nil && end[2] == backend, "no training on backend %s:\n%s", backend, out)
	return end[1] + " " + end[3]
}

// TestMachinesLearn: the same over every wire, and without hierarchy what shared memory learns.
func TestMachinesLearn(t *testing.T) {
	train := []string{built(t, digits), "--epochs", "5"}
	onHost, err := command(t, append([]string{"run", "-n", "4"}, train...)...).CombinedOutput()
	require.That(t, err == nil, "%v\n%s", err, onHost)
	flat := append([]string{"env", "EURYALE_HIERARCHY=never"}, train...)
	cases := []struct {
		machines int
		wire     proctest.Wire
		program  []string
		want     string
	}{
		{2, proctest.Wire{}, flat, learned(t, string(onHost), "host")},
		{2, proctest.Wire{}, train, ""},
		{3, proctest.Wire{}, train, ""},
		{2, proctest.Wire{Delay: 2 * time.Millisecond}, train, ""},
		{2, proctest.Wire{Loss: 0.01}, train, ""},
		{2, proctest.Wire{Rate: 10e6}, train, ""},
		{3, proctest.Wire{Delay: time.Millisecond, Loss: 0.002, Rate: 50e6}, train, ""},
	}
	if !full() {
		cases = cases[:2]
	}
	first := map[int]string{} // what machines with hierarchy learn, by their number
	for _, c := range cases {
		t.Run(fmt.Sprintf("%d machines, %+v, %s", c.machines, c.wire, c.program[1]),
			func(t *testing.T) {
				end := learned(t, startJob(t, proctest.Machines(t, c.machines, c.wire),
					c.program...).
					succeeds(t), "tcp")
				want := c.want
				if want == "" {
					want = first[c.machines]
				}
				if want == "" {
					first[c.machines] = end
				} else if end != want {
					t.Errorf("it ends with %s, others with %s", end, want)
				}
			})
	}
}

// TestMachinesTrainATransformer: samples are divided between machines and weights inside them, or
// sequences between machines, and the loss is the loss of one rank.
func TestMachinesTrainATransformer(t *testing.T) {
	if !full() {
		t.Skip("TestMachinesLearn is the sample: set EURYALE_FULL=1")
	}
	text := require.Value(filepath.Abs("../../docs/benchmarks.md"))(t)
	flags := "--layers 2 --width 32 --context 33 --steps 40 --lr 1e-2 --data " + text
	train := append([]string{built(t, "examples/gpt")}, strings.Fields(flags)...)
	loss := func(printed string) (loss, eval float64) {
		t.Helper()
		end := regexp.MustCompile(`loss=(\S+) eval=(\S+) ranks=`).FindStringSubmatch(printed)
		require.That(t, end != nil, "no training:\n%s", printed)
		require.NoError(t, require.Err(fmt.Sscan(end[1]+" "+end[2], &loss, &eval)))
		return loss, eval
	}
	alone, err := exec.Command(train[0], train[1:]...).CombinedOutput()
	require.That(t, err == nil, "%v\n%s", err, alone)
	want, wantEval := loss(string(alone))
	for _, layout := range []string{"--tp 2", "--sp 2 --tp 2", "--sp 2"} {
		t.Run(layout, func(t *testing.T) {
			got, eval := loss(startJob(t, proctest.Machines(t, 2, proctest.Wire{}),
				append(train, strings.Fields(layout)...)...).succeeds(t))
			require.Check(t, math.Abs(got-want) <= 1e-3 && math.Abs(eval-wantEval) <= 1e-3,
				"the loss is %v, and %v of held-out text; on one rank %v and %v", got, eval, want,
				wantEval)
		})
	}
}

// loss is a way to lose ranks, or a machine.
type loss struct {
	name string
	// ranks, any of which may be named; none for those elsewhere, where a network is lost
	lost   []int
	silent int // the machine whose launcher cannot name anybody, or -1
	within time.Duration
	lose   func(t *testing.T, j job)
}

// losses returns the losses of a job of so many machines. A sample of them runs beside other tests.
func losses(machines int) []loss {
	notice := 10 * time.Second
	if full() {
		notice = time.Second
	}
	silence := patience + time.Second + notice // to take leave of those who do not answer
	var all []loss
	for rank := range 2 * machines {
		all = append(all, loss{fmt.Sprint("kill -9 of rank ", rank), []int{rank}, -1, notice,
			func(t *testing.T, j job) { j.kill(t, rank) }})
	}
	for m := range machines {
		ranks := []int{2 * m, 2*m + 1}
		all = append(all,
			loss{fmt.Sprint("kill -9 of launcher ", m), ranks, m, notice,
				func(t *testing.T, j job) { j.launchers[m].Process.Kill() }},
			loss{fmt.Sprint("kill -9 of all ranks of machine ", m), ranks, -1, notice,
				func(t *testing.T, j job) { j.kill(t, ranks...) }},
			loss{fmt.Sprintf("machine %d is stopped", m), ranks, m, silence,
				func(t *testing.T, j job) { j.machines[m].Signal(t, syscall.SIGSTOP) }},
			loss{fmt.Sprintf("machine %d is cut off", m), nil, -1, silence,
				func(t *testing.T, j job) { j.machines[m].Cut(t) }},
			loss{fmt.Sprintf("machine %d is not heard", m), nil, -1, silence,
				func(t *testing.T, j job) { j.machines[m].Mute(t) }})
	}
	return all
}

// sample are the losses that are tested by default.
var sample = []string{"kill -9 of rank 2", "kill -9 of launcher 1", "machine 1 is not heard"}

// TestMachinesNameEveryLoss: within a second where connections end, else within the timeout.
// Nothing is left anywhere.
func TestMachinesNameEveryLoss(t *testing.T) {
	program := built(t, digits)
	sizes := []int{2}
	if full() {
		sizes = append(sizes, 3)
	}
	for _, size := range sizes {
		for _, l := range losses(size) {
			if full() || slices.Contains(sample, l.name) {
				t.Run(fmt.Sprintf("%d machines, %s", size, l.name), func(t *testing.T) {
					l.happens(t, size, program)
				})
			}
		}
	}
}

// happens has a job train, loses ranks, and sees who names them, and when.
func (l loss) happens(t *testing.T, size int, program string) {
	j := startJob(t, proctest.Machines(t, size, proctest.Wire{}), program, "--epochs", "1000000")
	if !j.launchers[0].Says(regexp.MustCompile(`epoch 2/`), long) {
		t.Fatalf("no training:\n%s", j.launchers[0].Output())
	}
	l.lose(t, j)
	began := time.Now()
	for i, launcher := range j.launchers {
		if i == l.silent {
			continue
		}
		if !launcher.Says(l.names(i, size), l.within-time.Since(began)) {
			t.Errorf("machine %d has not named the loss after %v:\n%s", i, time.Since(began),
				launcher.Output())
		}
		t.Logf("machine %d has named the loss after %v", i, time.Since(began).Round(
			time.Millisecond))
	}
	for i, m := range j.machines {
		m.Signal(t, syscall.SIGCONT)
		if err := j.launchers[i].Ends(t, long); err == nil {
			t.Errorf("launcher %d has ended well:\n%s", i, j.launchers[i].Output())
		}
		m.IsEmpty(t)
	}
}

// names matches what the launcher of a machine of size says of the loss. A machine that is not
// heard may hear first that the others miss it.
func (l loss) names(machine, size int) *regexp.Regexp {
	lost := l.lost
	for rank := range 2 * size {
		if l.lost == nil &&
			(rank/2 != machine || strings.HasSuffix(l.name, fmt.Sprintf("machine %d is not heard",
				machine))) {
			lost = append(lost, rank)
		}
	}
	ranks := strings.ReplaceAll(strings.Trim(fmt.Sprint(lost), "[]"), " ", "|")
	return regexp.MustCompile(`\b(rank (` + ranks + `) (is down|failed)|because of rank (` + ranks +
		`)\b|no sign of ranks? (` + ranks + `)\b)`)
}

// TestMachinesUnderOtherLaunchers: four ranks on two machines, with the variables that launchers
// set.
func TestMachinesUnderOtherLaunchers(t *testing.T) {
	for launcher, variables := range map[string]string{
		"torchrun": "RANK=%[1]d WORLD_SIZE=4 LOCAL_RANK=%[2]d LOCAL_WORLD_SIZE=2 " +
			"GROUP_RANK=%[3]d MASTER_ADDR=%[4]s MASTER_PORT=29500 " +
			"TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RUN_ID=none " +
			"TORCHELASTIC_RESTART_COUNT=0",
		"Kubeflow": "RANK=%[1]d WORLD_SIZE=4 MASTER_ADDR=%[4]s MASTER_PORT=23456",
		"Hydra": "PMI_RANK=%[1]d PMI_SIZE=4 MPI_LOCALRANKID=%[2]d MPI_LOCALNRANKS=2 " +
			"EURYALE_JOB=job MASTER_ADDR=%[4]s EURYALE_PORT=29512",
		"srun": "SLURM_PROCID=%[1]d SLURM_NTASKS=4 SLURM_LOCALID=%[2]d SLURM_NODEID=%[3]d " +
			"SLURM_TASKS_PER_NODE=2(x2) SLURM_JOB_ID=41 SLURM_STEP_ID=0 MASTER_ADDR=%[4]s",
	} {
		t.Run(launcher, func(t *testing.T) {
			j := job{machines: proctest.Machines(t, 2, proctest.Wire{})}
			for rank := range 4 {
				cmd := command(t, "bench", "--backend=tcp", "--min=1K", "--max=4K", "--factor=4",
					"--iters=5")
				set := fmt.Sprintf(variables, rank, rank%2, rank/2, j.machines[0].Addr)
				cmd.Env = append(append(cmd.Env, "EURYALE_TOKEN="+secret), strings.Fields(set)...)
				j.launchers = append(j.launchers,
					proctest.Launch(t, j.machines[rank/2].Command(cmd)))
			}
			if out := j.succeeds(t); !strings.Contains(out, "# ranks: 4 processes") {
				t.Errorf("rank 0 printed\n%s", out)
			}
		})
	}
}

// TestMachinesLearnUnderLaunchers: the launchers of others that this host has start two ranks on
// each machine. Over sockets and without hierarchy they learn what shared memory learns.
func TestMachinesLearnUnderLaunchers(t *testing.T) {
	if !full() {
		t.Skip("EURYALE_FULL=1 runs it")
	}
	const epochs = "--epochs=5"
	program := built(t, digits, "mpi")
	onHost, err := command(t, "run", "-n", "4", program, epochs).CombinedOutput()
	require.That(t, err == nil, "%v\n%s", err, onHost)
	want := learned(t, string(onHost), "host")
	for _, c := range []struct {
		launcher, engine string
		machines         int
	}{
		{"mpirun.openmpi", "tcp", 2}, {"mpirun.openmpi", "mpi", 2}, {"mpirun.openmpi", "mpi", 3},
		{"mpiexec.hydra", "tcp", 2}, {"mpiexec.hydra", "mpi", 2}, {"mpiexec.hydra", "mpi", 3},
		{"torchrun", "tcp", 2},
	} {
		t.Run(fmt.Sprintf("%s, %s, %d machines", c.launcher, c.engine, c.machines),
			func(t *testing.T) {
				if _, err := exec.LookPath(c.launcher); err != nil {
					t.Skip(err)
				}
				j := job{machines: proctest.Machines(t, c.machines, proctest.Wire{})}
				for i, args := range startedBy(c.launcher, proctest.Shell(t, j.machines),
					j.machines) {
					cmd := exec.Command(c.launcher, append(args, program, epochs)...)
					cmd.Env = append(os.Environ(), "EURYALE_TOKEN="+secret,
						"EURYALE_BACKEND="+c.engine,
						"EURYALE_HIERARCHY=never",
						"MASTER_ADDR="+j.machines[0].Addr, "MASTER_PORT=29533",
						"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
						"FI_TCP_IFACE=eth0", "GLOO_SOCKET_IFNAME=eth0")
					j.launchers = append(j.launchers,
						proctest.Launch(t, j.machines[i].Command(cmd)))
				}
				if end := learned(t, j.succeeds(t), c.engine); c.engine == "tcp" && end != want {
					t.Errorf("it ends with %s, on one machine with %s", end, want)
				}
			})
	}
}

// startedBy returns the arguments of a launcher before the program, for each machine on which it is
// started. The shell is used in place of ssh.
func startedBy(launcher, shell string, machines []*proctest.Namespace) (args [][]string) {
	var hosts []string
	for _, m := range machines {
		hosts = append(hosts, m.Addr+":2")
	}
	all := strings.Join(hosts, ",")
	switch launcher {
	case "mpirun.openmpi":
		return [][]string{strings.Fields("--mca plm_rsh_agent " + shell +
			" --mca plm_rsh_no_tree_spawn 1 --mca oob_tcp_if_include eth0 --mca btl tcp,self " +
			"--mca btl_tcp_if_include eth0 --oversubscribe -x EURYALE_TOKEN -x EURYALE_BACKEND " +
			"-x EURYALE_HIERARCHY -x MASTER_ADDR -x MASTER_PORT -H " + all)}
	case "mpiexec.hydra":
		return [][]string{strings.Fields("-launcher ssh -launcher-exec " + shell +
			" -iface eth0 -n " + fmt.Sprint(2*len(machines)) + " -hosts " + all)}
	}
	for r := range machines {
		args = append(
			args, strings.Fields(fmt.Sprintf("--nnodes=%d --node-rank=%d --nproc-per-node=2 "+
				"--master-addr=%s --master-port=29500 --log-dir=%s --no-python", len(machines), r,
				machines[0].Addr, filepath.Dir(shell))))
	}
	return args
}

func TestMachinesThatCannotBeAreErrors(t *testing.T) {
	for args, want := range map[string]string{
		"--nnodes=2 /bin/true":                                   "--rendezvous HOST:PORT",
		"--nnodes=2 --node-rank=2 --rendezvous=a:1 /bin/true":    "machines are numbered from 0",
		"--nnodes=2 --rendezvous=a:1 --max-restarts=1 /bin/true": "one machine only",
		"--nnodes=2 --rendezvous=nowhere /bin/true":              "give HOST:PORT",
		"--nnodes=2 --rendezvous=127.0.0.1:1 /bin/true":          "set EURYALE_TOKEN",
		"--nnodes=0 --rendezvous=127.0.0.1:99 /bin/true":         "machines are numbered from 0",
	} {
		cmd := command(t, append([]string{"run", "-n", "1"}, strings.Fields(args)...)...)
		cmd.Env = append(cmd.Env, "EURYALE_TOKEN=")
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), want) {
			t.Errorf("%s: %v, want %q\n%s", args, err, want, out)
		}
	}
}

// TestTheRecipeOfMetricsWorksUnderALauncher: the commands of docs/observing.md, with an address of
// this machine, free ports and a program. Without the credential nobody reads anything.
func TestTheRecipeOfMetricsWorksUnderALauncher(t *testing.T) {
	page := require.Value(os.ReadFile("../../docs/observing.md"))(t)
	recipe := regexp.MustCompile("(?s)```sh\n(export EURYALE_TOKEN.*?)```").FindSubmatch(page)
	require.That(t, recipe != nil, "docs/observing.md has no recipe")
	for _, tool := range []string{"bash", "curl", "openssl"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(err)
		}
	}
	bin, self, at := t.TempDir(), command(t).Path, ""
	require.NoError(t, os.Symlink(self, filepath.Join(bin, "euryale")))
	addresses, err := net.InterfaceAddrs()
	for _, a := range addresses {
		if n := a.(*net.IPNet); n.IP.IsGlobalUnicast() && n.IP.To4() != nil {
			at = n.IP.String()
		}
	}
	if err != nil || at == "" {
		t.Skipf("this machine has no address but loopback (%v)", err)
	}
	first := 20000 + rand.IntN(12000) // no connection gets such a number
	script := strings.NewReplacer("10.0.0.1", at, "9090", fmt.Sprint(first), "9091",
		fmt.Sprint(first+1), "PROGRAM", self+" "+brokenRank+" 'serve metrics'",
		"&\n", "&\nuntil curl -s $both; do sleep 0.1; done\n").Replace(string(recipe[1]))
	cmd := exec.Command("bash", "-c", "set -e; trap 'kill %1; wait' EXIT\n"+script+
		`curl -s -w 'without: %{http_code}\n' $both
		curl -s -w 'with the token: %{http_code}\n' -H "Authorization: Bearer $EURYALE_TOKEN" $both
		EURYALE_TOKEN= EURYALE_CREDENTIAL=$credential euryale top `+fmt.Sprint(at, ":", first))
	cmd.Env = append(command(t).Env, "PATH="+bin+":"+os.Getenv("PATH"),
		fmt.Sprintf("both=http://%s:%d/metrics http://%[1]s:%d/metrics", at, first, first+1))
	l := proctest.Launch(t, cmd)
	require.Report(t, l.Ends(t, long))
	out := l.Output()
	for want, times := range map[string]int{
		`euryale_rank_info{backend="host"`: 1, "without: 401": 2,
		"with the token: 401": 2, "2 of 2 ranks": 1, "1 of 2 ranks": 1, "no metrics": 0} {
		if strings.Count(out, want) != times {
			t.Errorf("%q is there %d times, want %d:\n%s", want, strings.Count(out, want), times,
				out)
		}
	}
}
