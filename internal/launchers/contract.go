// Package launchers knows what launchers tell the programs that they start: a [Contract] for each,
// in a file of its own, with the address of its documentation.
//
// [Rank] and [Machine] find the contract that holds for a process. Everything here is a pure
// function of a [Lookup].
package launchers

import (
	"fmt"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/internal/env"
)

// Lookup returns the value of a variable, "" if it is not set, as os.Getenv does. That of
// [env.Lookup] also knows names with a *, which some contracts take.
type Lookup = func(name string) string

// Contract is what the variables of a launcher mean.
type Contract struct {
	// Name is the launcher's, for messages.
	Name string
	// Machines says that the launcher starts one command on each machine, pod or container, and
	// numbers these. Other launchers number processes.
	Machines bool
	// Daemons says that another launcher may have started the daemons of this one, so that its
	// processes have the variables of both.
	Daemons bool
	// Rank, Size, LocalRank and LocalSize are the variables with these numbers; the first that is
	// set counts.
	Rank, Size, LocalRank, LocalSize []env.Count
	// Meet is the variable with where rank 0 is: a name or an address, with a port or without, or a
	// list that begins with that. Job are variables that together tell the job from others; nil
	// means Meet.
	Meet string
	Job  []string
	// Signs are the variables that tell that the launcher has started this program, once or
	// several times; nil means all of the above but Job.
	Signs []string
	// More reads what is no plain number; nil if all is.
	More func(*Vars, *Position)
	// Advice is what to do where variables are missing; "" means what helps with any launcher.
	Advice string
}

type counts = []env.Count

// Unknown is a number that no variable gives.
const Unknown = -1

// Position is what the variables say of a program, or of a command on each machine.
type Position struct {
	Rank, Size           int
	LocalRank, LocalSize int
	PerMachine           int    // how many ranks each machine is to have, or Unknown
	Addr                 string // of the machine of rank 0
	Port                 int    // a free one there, or 0
	Job                  string // tells the job from others, "" if no variable does
	By                   string // who the launcher is, if several have these variables
	Script               bool   // the program is a batch script, which is started once
	Proxy                bool   // the ranks of a machine have one parent, which tells jobs apart
}

// SignNames are the names of Signs.
func (c Contract) SignNames() []string {
	if c.Signs != nil {
		return c.Signs
	}
	signs := names(c.Rank, c.Size, c.LocalRank, c.LocalSize)
	if c.Meet != "" {
		signs = append(signs, c.Meet)
	}
	return signs
}

func names(lists ...[]env.Count) (all []string) {
	for _, name := range slices.Concat(lists...) {
		all = append(all, string(name))
	}
	return all
}

// read returns what the variables say, nil if none of the signs is set.
func (c Contract) read(get Lookup) *Found {
	isSet := func(name string) bool { return get(name) != "" }
	first := slices.IndexFunc(c.SignNames(), isSet)
	if first < 0 {
		return nil
	}
	v := &Vars{get: get, used: map[string]bool{}}
	sign := c.SignNames()[first]
	f := &Found{Of: c, sign: fmt.Sprintf("%s=%.60s", sign, get(sign)), used: v.used,
		Position: Position{Rank: v.Count(c.Rank...), Size: v.Count(c.Size...),
			LocalRank: v.Count(c.LocalRank...), LocalSize: v.Count(c.LocalSize...),
			PerMachine: Unknown}}
	for _, name := range c.SignNames() {
		v.Text(name) // counts as used
	}
	f.Job = v.Text(c.Meet)
	v.meet(&f.Position, strings.Fields(strings.ReplaceAll(f.Job, ",", " ")))
	if c.Job != nil {
		f.Job = v.join(c.Job...)
	}
	if c.More != nil {
		c.More(v, &f.Position)
	}
	if f.Size == 1 && f.Rank == Unknown {
		f.Rank = 0
	}
	f.err = v.err
	if f.Script && f.err == nil {
		return nil
	}
	return f
}
