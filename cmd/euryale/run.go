package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/launch"
	"github.com/euryale-ml/euryale/internal/launchers"
	"github.com/euryale-ml/euryale/rendezvous"
)

// runCmd is "euryale run".
type runCmd struct {
	N           rankCount     `short:"n" help:"Number of ranks (default: one per CPU, 8 at most; here ${ranks}). On hosts, of all of them (default: as many as they take)."`
	Hosts       string        `short:"H" name:"hosts" placeholder:"HOST:N,..." xor:"hosts" help:"Start the ranks on these hosts by ssh, up to N on each. Hosts beyond -n are on standby."`
	Hostfile    string        `placeholder:"FILE" xor:"hosts" predictor:"file" help:"Read the hosts from a file, a line for each: HOST slots=N."`
	Grace       time.Duration `default:"1s" help:"Time from the signal that tells ranks to end to SIGKILL. Ranks may save a checkpoint in it."`
	LogDir      string        `placeholder:"DIR" predictor:"directory" help:"Also write the output of each rank to a file, DIR/attempt_0/rank_0.log and so on. Logs of an earlier job are refused, not overwritten."`
	MaxRestarts int           `default:"0" help:"How often to restart all ranks after one has failed."`
	Elastic     bool          `help:"Replace ranks that die, while the others train on. The program joins by euryale.JoinElastic."`
	MinRanks    int           `default:"1" help:"With --elastic: with fewer ranks than these the job waits for replacements."`
	Standby     int           `aliases:"spares" default:"0" help:"With --elastic: how many more processes to start, which wait to replace one."`
	Nnodes      *int          `name:"nnodes" help:"Number of machines, each with -n ranks. Start the command on each. (default: as the launcher says that has started it; else 1)"`
	NodeRank    *int          `help:"Number of this machine, from 0. (default: as that launcher says; else 0)"`
	Rendezvous  string        `placeholder:"HOST:PORT" help:"Where the machines meet: an address of machine 0, and a free port there. (default: as that launcher says)"`
	Command     []string      `arg:"" passthrough:"" name:"program" predictor:"file" help:"An executable in PATH or by its path, or the directory of a Go package, which is built first. Everything after it goes to the program."`
}

// Help says what the one-line help leaves out.
func (*runCmd) Help() string {
	return `Every rank is a process, with RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
MASTER_ADDR, MASTER_PORT, EURYALE_JOB and EURYALE_TOKEN set. Except with --nnodes, the token is a
fresh one; only the EURYALE_CREDENTIAL of metrics is derived from yours. With several ranks, every
line of output begins with its rank. When a rank fails, the others are ended, and euryale run ends
with the error and the exit code of that rank.

Signals go to the ranks. SIGINT, SIGTERM and SIGHUP tell them to end; ranks that are alive after
--grace are killed, and a second signal kills at once. On SIGQUIT (Ctrl-\) each rank prints its
last collectives (EURYALE_LAST_CALLS, 10) and the stacks of its goroutines, and ends. The exit
code is then 128 plus the number of the signal.

With --max-restarts, each attempt is a new job. TORCHELASTIC_RESTART_COUNT counts the attempts
from 0, and the program loads its last checkpoint. There is no restart after a signal to euryale
run, nor if the rank that failed first ended with exit status 2 without a crash, as for a wrong
command line. Only the first attempt has the standard input.

With -H or --hostfile, ssh starts a launcher on each host, as ssh HOST true must be able to without
a question. This program and yours are copied there, once per content; Go packages are built for
each host, and a PROGRAM without a slash is the host's own. When a rank fails or a host is lost, all
ranks end. --max-restarts starts them anew, on standby hosts of -H in the place of lost hosts.

With --elastic a rank that dies is replaced by a process on the same host, or, if that is lost, on
the first one that has room: N of -H is how many processes a host takes, those on standby included.
The file of --hostfile may change then: hosts that are added to it, or were lost and are back, take
processes again, up to -n ranks; those of a host that is removed are told to end and replaced.

With --nnodes the job is on several machines. Run the same command on each, with its own
--node-rank and with the same secret in EURYALE_TOKEN, 16 characters or more; the ranks of machine
r are numbered from r*N. Where srun, SkyPilot, Kubernetes or another launcher starts the command on
each machine, its variables say the rest: srun euryale run -n 4 PROGRAM is one job, and
--nnodes 1 makes a job of each machine. Each launcher sees its own ranks only. They tell it when the
job loses a rank elsewhere, and those that have not ended EURYALE_TIMEOUT later are ended. With
--elastic machine 0 has the job, and the others may leave, be lost and come back.

Examples:

	euryale run -n 4 ./examples/digits -epochs 3
	euryale run -n 4 --max-restarts 2 ./examples/digits -checkpoint /tmp/digits
	euryale run -n 4 --elastic --standby 1 ./examples/digits -elastic
	euryale run -H a:4,user@b:4 ./examples/digits

On two machines, each with its number and with the same secret in EURYALE_TOKEN:

	euryale run --nnodes 2 --node-rank 0 --rendezvous 10.0.0.1:29500 -n 4 ./examples/digits`
}

// Validate rejects impossible numbers.
func (c *runCmd) Validate() error {
	switch {
	case c.Grace <= 0:
		return fmt.Errorf("--grace=%v: the time must be positive", c.Grace)
	case c.MaxRestarts < 0:
		return fmt.Errorf("--max-restarts=%d: the number must not be negative", c.MaxRestarts)
	case !c.Elastic && (c.MinRanks != 1 || c.Standby != 0):
		return errors.New("--min-ranks and --standby are for --elastic")
	case c.Nnodes != nil && *c.Nnodes > 1 && (c.Hosts != "" || c.Hostfile != ""):
		return errors.New("--nnodes is for launchers that are started on each machine: -H and " +
			"--hostfile start them")
	}
	return nil
}

// Run starts the ranks and waits for them. It passes signals on to them, so it does not
// use the context that a signal ends.
func (c *runCmd) Run(s *streams, parsed *kong.Context) error {
	machines, err := c.machines(s)
	if err != nil {
		return usageError{err}
	}
	program, args, err := c.split(parsed.Flags())
	if err != nil {
		return err
	}
	warnOfUnread(s)
	job := launch.Job{
		Program: program, Args: args, Ranks: int(c.N), Stdin: s.in, Stdout: s.out, Stderr: s.err,
		LogDir: c.LogDir, Grace: c.Grace, MaxRestarts: c.MaxRestarts,
		Notice: func(text string) { fmt.Fprintln(s.err, "euryale:", rendezvous.Printable(text)) },
	}
	job.Hosts, err = c.hosts()
	switch {
	case err != nil:
		return err
	case len(job.Hosts) > 0:
		job.Stdin, job.Rendezvous = nil, c.Rendezvous
	default:
		job.Machines = machines
	}
	if job.Ranks == 0 {
		job.Ranks = defaultRanks()
		if len(job.Hosts) > 0 {
			job.Ranks = max(1, launch.Slots(job.Hosts)-c.Standby)
		}
	}
	if c.Elastic {
		job.Elastic = &launch.Elastic{Least: c.MinRanks, Standby: c.Standby}
	}
	if c.Elastic && c.Hostfile != "" { // hosts are added to it, and removed
		job.Elastic.Hosts, job.Elastic.Most = c.hosts, job.Ranks
		job.Ranks = min(job.Ranks, max(1, launch.Slots(job.Hosts)-c.Standby))
	}
	signals, stop := jobSignals()
	defer stop()
	job.Signals = signals
	err = launch.Run(context.Background(), job)
	return misplaced(err, args)
}

// machines returns the place of this machine in its job, nil in a job of this machine alone. What
// flags leave out, the launcher says that has started this command.
func (c *runCmd) machines(s *streams) (*launch.Machines, error) {
	number := func(given *int, otherwise int) int {
		if given != nil {
			return *given
		}
		return otherwise
	}
	onHosts := c.Hosts != "" || c.Hostfile != ""
	said := number(c.Nnodes, 0) == 1 || c.Nnodes != nil && c.NodeRank != nil && c.Rendezvous != ""
	found, err := launchers.Machine(env.Lookup(os.Environ()))
	switch {
	case said:
		found = &launchers.Found{Position: launchers.Position{By: launchers.None}}
	case onHosts && found.Rank > 0:
		return nil, fmt.Errorf("%s has started this command several times, this one as number %d, "+
			"and -H and --hostfile start all ranks from one: start it once", found.Launcher(),
			found.Rank)
	case onHosts:
		return nil, nil
	case err == nil && c.Nnodes == nil:
		err = found.Incomplete()
	}
	if err != nil && !said {
		return nil, fmt.Errorf("%w; --nnodes, --node-rank and --rendezvous say the place of this "+
			"machine, and --nnodes 1 that the job is its own", err)
	}
	m := &launch.Machines{Count: number(c.Nnodes, max(1, found.Size)), Rendezvous: c.Rendezvous,
		Number: number(c.NodeRank, max(0, found.Rank)), Token: env.Token.Read(os.Getenv)}
	if m.Rendezvous == "" && m.Count > 1 && found.Addr != "" && found.Port != 0 {
		m.Rendezvous, m.Job = net.JoinHostPort(found.Addr, strconv.Itoa(found.Port)), found.Job
	}
	by, unsaid := "", ""
	if found.Size > 1 || found.Rank > 0 {
		by = ", by flags or " + found.Launcher()
		unsaid = "; " + found.Launcher() + " says no such address"
	}
	switch {
	case m.Count < 1 || m.Number < 0 || m.Number >= m.Count:
		return nil, fmt.Errorf("--node-rank=%d of --nnodes=%d%s: machines are numbered from 0",
			m.Number, m.Count, by)
	case m.Count > 1 && m.Rendezvous == "":
		return nil, fmt.Errorf("%d machines need --rendezvous HOST:PORT: an address of machine 0 "+
			"that all machines reach, and a free port there%s", m.Count, unsaid)
	case m.Count > 1 && c.MaxRestarts > 0:
		return nil, errors.New("--max-restarts works on one machine only: the launchers of " +
			"several do not know of each other, unless -H or --hostfile starts them")
	case m.Count == 1 && m.Rendezvous == "":
		return nil, nil
	}
	if found.Size > 1 {
		if c.N == 0 && found.PerMachine > 0 {
			c.N = rankCount(found.PerMachine)
		}
		fmt.Fprintf(s.err, "euryale: %s has started this command %d times: it is number %d of one "+
			"job, which meets at %s\n", found.Launcher(), m.Count, m.Number, m.Rendezvous)
	}
	return m, nil
}

// jobSignals returns the signals that go to the ranks.
func jobSignals() (signals chan os.Signal, stop func()) {
	signals = make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGQUIT)
	if !signal.Ignored(syscall.SIGHUP) { // as under nohup
		signal.Notify(signals, syscall.SIGHUP)
	}
	// Writing to a closed pipe then returns an error instead of ending this process.
	pipe := make(chan os.Signal, 1)
	signal.Notify(pipe, syscall.SIGPIPE)
	return signals, func() {
		signal.Stop(signals)
		signal.Stop(pipe)
	}
}

// misplaced adds a hint to the usage error of a program that was given -n, which may have
// been meant for euryale run.
func misplaced(err error, args []string) error {
	var f *launch.Failed
	if errors.As(err, &f) && f.Usage() && slices.Contains(args, "-n") {
		return fmt.Errorf("%w\n-n came after the program and went to it: euryale run -n N "+
			"PROGRAM starts N ranks", err)
	}
	return err
}

// rankCount is a number of ranks that one machine can start.
type rankCount int

// Decode reads the number, also one that looks like a flag, such as -1. Its limit keeps a typing
// error from taking all memory.
func (n *rankCount) Decode(c *kong.DecodeContext) error {
	token := c.Scan.Pop()
	if token.IsEOL() {
		return errors.New("expected a value, but nothing follows")
	}
	parsed, err := strconv.Atoi(token.String())
	if err != nil || parsed < 1 || parsed > launch.MaxRanks {
		return fmt.Errorf("%s is not a number of ranks: write 1 to %d", token, launch.MaxRanks)
	}
	*n = rankCount(parsed)
	return nil
}

// split separates the program from its arguments. Kong passes everything from the first
// word on that is not a known flag.
func (c *runCmd) split(flags []*kong.Flag) (program string, args []string, err error) {
	words := c.Command
	if len(words) > 0 && words[0] == "--" {
		words = words[1:]
	} else if len(words) > 0 && strings.HasPrefix(words[0], "-") {
		err := fmt.Sprintf("run has no flag %s: %sflags of the program come after it", words[0],
			meantFlag(words[0], flags))
		return "", nil, usageError{errors.New(cmp.Or(hint(words[:1]), err))}
	}
	if len(words) == 0 || words[0] == "" {
		return "", nil,
			usageError{errors.New(noProgram)}
	}
	return words[0], words[1:], nil
}

const noProgram = "run which program? Give an executable or the directory of a Go package"

// meantFlag says which flag a wrong one may mean, or where they are.
func meantFlag(wrong string, flags []*kong.Flag) string {
	name, _, _ := strings.Cut(wrong, "=")
	var names []string
	for _, f := range flags {
		names = append(names, "--"+f.Name)
	}
	if meant := nearest(name, names); meant != "" {
		return fmt.Sprintf("did you mean %s? ", meant)
	}
	return "see euryale run --help; "
}
