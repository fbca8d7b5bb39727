package gpu

import (
	"fmt"
	"os"
	"time"

	"github.com/euryale-ml/euryale/internal/env"
	"github.com/euryale-ml/euryale/internal/tuning"
)

// Options say how a group is made. Those that all ranks must share are rank 0's.
type Options struct {
	// Timeout is how long a kernel waits for another rank; 0 means twice as long as the
	// host waits. It is the last resort, where the host cannot end the wait.
	Timeout time.Duration
	// Off leaves everything to NCCL, on every rank if it is set on one.
	Off bool

	// Table is what to choose by; nil means Measured, and what ranks measure as they connect
	// where that has nothing for their devices: see the package's documentation.
	Table Table
	// Force uses one algorithm wherever it can be used; NCCL, the zero value,
	// chooses by Table.
	Force Algorithm
	// Link takes the place of what is found out about the connections; Unknown, the
	// zero value, does not.
	Link Link
	// Staging is the memory that operands are shown in, in bytes, twice; 0 means
	// 64 MiB. Larger calls take more rounds.
	Staging int
	// Halved is the size in bytes of f32 from which on calls that may travel as 16 bits
	// do; 0 means what was measured to win, below 0 none do.
	Halved int
	// Blocks limits grids; 0 is no limit. SharedDevices lets several ranks of one
	// process use one device, which then needs room for all their grids at a time.
	Blocks        int
	SharedDevices bool

	measure bool // what Table lacks, as ranks connect
}

func parse(mode string) (Options, error) {
	switch mode {
	case "", "auto":
		return Options{}, nil
	case "off":
		return Options{Off: true}, nil
	}
	force, err := parseAlgorithm(mode)
	if err != nil {
		return Options{}, fmt.Errorf("%w, auto or off", err)
	}
	return Options{Force: force, Off: force == byNCCL}, nil
}

// Asked reads what a user asks for: "auto" for the table, "off", or the name of an algorithm. Where
// that is empty EURYALE_LOWLATENCY says it, auto if it is not set, and errors name the variable.
func Asked(mode string) (Options, error) {
	if mode != "" {
		return parse(mode)
	}
	mode = env.LowLatency.Text(os.Getenv)
	o, err := parse(mode)
	return o, env.LowLatency.Wrong(mode, err)
}

// settings are what rank 0 decides.
type settings struct {
	Force   Algorithm
	Link    Link
	Shared  bool
	Halved  int
	Staging int
	Blocks  int
	Table   Table
	Measure bool // what Table lacks
}

// stagingBytes is one half of the staging of a rank. A round of a two-shot fills it, and each round
// costs some time: bench/results/2026-11/2026-11-23-h200x2-push.txt compares sizes.
const stagingBytes = 64 << 20

// halvedBytes is the smallest operand that one kernel sends as 16 bits: 1 MiB takes 8 us on
// two and 12 us on four H200, against 15 to 25 us with two casts around a call (2026-11-21).
// Smaller operands were not measured.
const halvedBytes = 1 << 20

// measured returns o with its table. Only rank 0 reads it, since rank 0's table counts.
func (o Options) measured(rank int) (_ Options, err error) {
	if o.Table == nil && rank == 0 && !o.Off {
		o.Table, err = Measured()
		o.measure = o.Force == byNCCL && !tuning.Off()
	}
	return o, err
}

func (o Options) settings() settings {
	s := settings{Table: o.Table, Force: o.Force, Link: o.Link, Staging: o.Staging,
		Halved: o.Halved, Blocks: o.Blocks, Shared: o.SharedDevices, Measure: o.measure}
	if s.Staging <= 0 {
		s.Staging = stagingBytes
	}
	if s.Halved == 0 {
		s.Halved = halvedBytes
	}
	return s
}

// limit is how long kernels wait if the host waits for timeout.
func (o Options) limit(timeout time.Duration) time.Duration {
	if o.Timeout <= 0 {
		return 2 * timeout
	}
	return o.Timeout
}
