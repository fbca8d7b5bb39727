package launchers

import (
	"cmp"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/internal/env"
)

// Found is a contract whose variables are set, and what they say.
type Found struct {
	Of Contract
	Position

	sign string // the first of the signs that is set
	used map[string]bool
	err  error // of a value that cannot be read
}

// Launcher is the name of the launcher.
func (f *Found) Launcher() string { return cmp.Or(f.By, f.Of.Name) }

// HowToStart is the advice where no launcher has set up the environment.
const HowToStart = `start the program with "euryale run -n N PROGRAM", torchrun, mpirun, mpiexec ` +
	`or srun, or set all of RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and EURYALE_JOB`

// Rank finds the position of a program in its job. Contracts that number processes come before
// those that number machines, where a program is the one rank of its machine. Without any, the
// program is a job of one rank, and Name is "no launcher". With EURYALE_ALONE=1 only processes are
// numbered.
//
// Errors say which launchers have started several programs that would train alone: variables are
// missing, cannot be read, or those of two launchers contradict each other. The error is about the
// launcher in the result.
func Rank(get Lookup) (*Found, error) {
	f, err := find(get, false)
	switch {
	case err != nil:
		return f, err
	case !f.complete():
		return f, f.Incomplete()
	case f.Size > 1 && f.PerMachine > 1:
		return f, fmt.Errorf("each of the %d machines is to have %d ranks, and this program "+
			"would be its machine's only one: start it with euryale run -n %d PROGRAM", f.Size,
			f.PerMachine, f.PerMachine)
	}
	if err := f.meet(get); err != nil {
		return f, err
	}
	hasJob := f.Job != "" || f.Proxy && f.here() || env.Job.Read(get) != "" ||
		get(string(env.MasterPort)) != ""
	if f.Size > 1 && !hasJob {
		return f, f.refuse(fmt.Errorf("nothing names the job, so that its ranks find each other: "+
			"%s", cmp.Or(f.Of.Advice, "set EURYALE_JOB, or MASTER_PORT, with MASTER_ADDR if they "+
			"are on several machines, to the same on all ranks, and to another for each job")))
	}
	return f, nil
}

// Machine finds the place of a launcher that is started on each machine, or several times. It is
// as [Rank], but contracts that number machines come first, and what no variable says is Unknown.
func Machine(get Lookup) (*Found, error) {
	f, err := find(get, true)
	if err != nil || f.err != nil {
		return f, cmp.Or(err, f.Incomplete())
	}
	return f, f.meet(get)
}

// Incomplete is the error of variables that do not say where in its job a program is, nil if they
// do.
func (f *Found) Incomplete() error {
	var missing []string
	switch {
	case f.complete():
		return nil
	case f.Rank == Unknown && f.Of.Rank != nil:
		missing = names(f.Of.Rank)
	case f.Rank != Unknown && f.Of.Size != nil:
		missing = names(f.Of.Size)
	}
	why := f.err
	switch {
	case why != nil:
	case missing == nil:
		why = errors.New("its variables do not say which of how many programs this is")
	default:
		why = fmt.Errorf("%s is not set", strings.Join(missing, " or "))
	}
	return f.refuse(fmt.Errorf("%w: %s", why, cmp.Or(f.Of.Advice, HowToStart)))
}

// refuse is the error of a program that is one of several.
func (f *Found) refuse(why error) error {
	or := ""
	if f.Of.Machines || !f.complete() {
		or = "; or set EURYALE_ALONE=1 if this program is a job of its own"
	}
	return fmt.Errorf("%s is the sign of a job that %s has started, but %w%s", f.sign,
		f.Launcher(), why, or)
}

// None is the name where no launcher has started a program.
const None = "no launcher"

// none is the place of a program that no launcher has started.
func none() *Found {
	return &Found{Of: Contract{Name: None}, Position: Position{Size: 1, LocalSize: 1,
		PerMachine: Unknown, Job: "alone"}}
}

// find returns the first contract that is complete, else the first one.
func find(get Lookup, machinesFirst bool) (*Found, error) {
	alone, err := env.Alone.Read(get)
	if err != nil || alone && machinesFirst {
		return none(), err
	}
	var all []*Found
	for _, c := range All() {
		if f := c.read(get); f != nil && !(alone && (c.Machines || !f.complete())) {
			all = append(all, f)
		}
	}
	if len(all) == 0 {
		return none(), nil
	}
	first := slices.IndexFunc(all, func(f *Found) bool { return f.Of.Machines })
	if machinesFirst && first > 0 {
		all = slices.Concat(all[first:], all[:first])
	}
	i := max(0, slices.IndexFunc(all, (*Found).complete))
	f := all[i]
	for j, other := range all {
		if f.complete() && !alone && j != i {
			err = cmp.Or(err, f.against(other, j < i))
		}
	}
	return f, err
}

// complete reports whether the variables give a place.
func (f *Found) complete() bool {
	return f.err == nil && f.Rank != Unknown && f.Size != Unknown
}

// here reports whether all ranks of the job are on this machine.
func (f *Found) here() bool {
	return f.Size == 1 || !f.Of.Machines && f.LocalSize == f.Size
}

// against is the error of two contracts of which one says that there are several programs, and the
// other that there is a job for each of them. inner says that other's launcher would be the inner.
// In a job of several machines, other may be what has started the daemons of f. What numbers
// machines, euryale run has looked at itself.
func (f *Found) against(other *Found, inner bool) error {
	several := other.err != nil || other.Size > 1 || other.Rank > 0
	same := other.Rank == f.Rank && (other.Size == f.Size || other.Size == Unknown)
	ours := f.Launcher() == ourName && (other.Of.Machines || f.Size > 1)
	daemons := f.Of.Daemons && !other.Of.Machines && f.Size > 1
	switch {
	case f.hasAll(other) || ours:
		return nil
	case inner && !other.Of.Machines && !other.complete():
	case !several || same || daemons:
		return nil
	case f.here():
	case !f.Of.Machines || !other.Of.Machines || !other.complete():
		return nil
	}
	what := fmt.Errorf("by %s this is number %d of %d: unset the variables of one of them",
		f.Launcher(), f.Rank, f.Size)
	if other.err != nil {
		what = fmt.Errorf("%w: %w", what, other.err)
	}
	return other.refuse(what)
}

// hasAll reports whether the contract has all variables of another one that are set.
func (f *Found) hasAll(other *Found) bool {
	for name := range other.used {
		if !f.used[name] {
			return false
		}
	}
	return true
}

// meet completes the place with where ranks meet, which users may set for any launcher.
func (f *Found) meet(get Lookup) error {
	p := &f.Position
	if p.LocalRank == Unknown || p.LocalSize == Unknown {
		p.LocalRank, p.LocalSize = 0, 1 // the ranks find out
	}
	p.Addr = cmp.Or(env.MasterAddr.Read(get), p.Addr)
	v := Vars{get: get, used: map[string]bool{}}
	if port := v.Count(env.MasterPort); port != Unknown {
		p.Port = port
		if get("TORCHELASTIC_USE_AGENT_STORE") == "True" { // the agent listens there
			p.Port = PortOf(port)
		}
	}
	if p.Port == 0 && p.Addr != "" && p.Job != "" && p.Size > 1 {
		p.Port = PortOf(int(crc32.ChecksumIEEE([]byte(p.Job))))
	}
	if port := v.Count(env.Port); port != Unknown {
		p.Port = port
	}
	if p.Port > 65535 {
		v.fail(fmt.Errorf("port %d is out of range: ports are 1 to 65535", p.Port))
	}
	if p.Job != "" && f.Of.Name != none().Of.Name {
		p.Job = strings.ReplaceAll(strings.ToLower(f.Launcher()), " ", "-") + "-" + p.Job
	}
	return v.err
}
