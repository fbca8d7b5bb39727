package hierarchy

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/euryale-ml/euryale/backend"
	"github.com/euryale-ml/euryale/internal/tuning"
)

// Measurement is what was measured of one kind of machines. It is kept in the user's
// file: tuning.json in the directory euryale of the user's cache, or what
// EURYALE_TUNING names.
type Measurement struct {
	Model    string `json:"model"` // of the devices
	Machines int    `json:"machines"`
	Devices  int    `json:"devices"`
	// Declared says that the machines were declared, so that they may be one.
	Declared bool   `json:"declared,omitempty"`
	Links    Links  `json:"links"`
	Source   string `json:"source"` // where the numbers come from
}

// section is that of the links in the user's file.
const section = "hierarchy"

// Measured returns what was measured on machines of a layout, false if nothing was.
func Measured(model string, l Layout, declared bool) (m Measurement, found bool, err error) {
	all, err := tuning.Read[Measurement](section)
	want := Measurement{Model: model, Machines: l.Machines(), Devices: l.Devices(), Declared: declared}
	i := slices.IndexFunc(all, want.replaces)
	if err != nil || i < 0 {
		return m, false, err
	}
	if err := all[i].Links.check(); err != nil {
		path, _ := tuning.Path() // it was read
		return m, false, tuning.Broken(path, err)
	}
	return all[i], true, nil
}

// Keep puts a measurement into the user's file, in the place of that of the same
// machines, and returns the name of the file.
func (m Measurement) Keep() (file string, err error) {
	if err := m.Links.check(); err != nil {
		return "", err
	}
	return tuning.Update(section, func(all []Measurement) []Measurement {
		return append(slices.DeleteFunc(all, m.replaces), m)
	})
}

// replaces reports whether two are of the same machines.
func (m Measurement) replaces(other Measurement) bool {
	return m.Model == other.Model && m.Machines == other.Machines && m.Devices == other.Devices && m.Declared == other.Declared
}

// Part returns the communicator of a phase, nil if it has none. Calls of it that are
// not the phase's are for measurements: it must be idle, on every rank.
func (c *Communicator) Part(p Phase) backend.Communicator {
	if p >= phases {
		return nil
	}
	return c.parts[p]
}

// Timed is what a call took that moves bytes from each rank, in steps messages that
// wait for each other.
type Timed struct {
	Steps int
	Bytes float64
	Took  time.Duration
}

// Fit returns the link that explains measured calls best: the sum of the squares of
// its errors, each as a share of what was measured, is the smallest.
func Fit(calls []Timed) (Link, error) {
	// Per unit of what was measured: steps x latency + bytes / bandwidth = 1.
	var ss, sb, bb, s, b float64
	for _, t := range calls {
		steps, bytes := float64(t.Steps)/t.Took.Seconds(), t.Bytes/t.Took.Seconds()
		ss, sb, bb, s, b = ss+steps*steps, sb+steps*bytes, bb+bytes*bytes, s+steps, b+bytes
	}
	det := ss*bb - sb*sb
	latency, perByte := (s*bb-b*sb)/det, (b*ss-s*sb)/det
	if latency < 0 {
		latency, perByte = 0, b/bb
	}
	if !(perByte > 0) { // also if there is nothing to tell them apart by
		return Link{}, errors.New("the times of calls do not grow with their bytes: measure sizes that are further apart")
	}
	return Link{time.Duration(latency * float64(time.Second)).Round(time.Nanosecond), 1 / perByte}, nil
}

// bandwidths are the units that ParseLink takes.
var bandwidths = []struct {
	unit  string
	bytes float64
}{{"Gbit/s", 1e9 / 8}, {"Mbit/s", 1e6 / 8}, {"GB/s", 1e9}, {"MB/s", 1e6}, {"kB/s", 1e3}, {"B/s", 1}}

// ParseLink reads a latency and a bandwidth, as String writes them: "3us + 200GB/s".
// Networks are sold in "200Gbit/s", which works too.
func ParseLink(text string) (Link, error) {
	wrong := func() (Link, error) {
		return Link{}, fmt.Errorf("%w: link %q: write latency and bandwidth, such as 3us+200GB/s or 10us+200Gbit/s", backend.ErrArgument, text)
	}
	latency, bandwidth, _ := strings.Cut(strings.ReplaceAll(text, " ", ""), "+")
	t, err := time.ParseDuration(latency)
	if err != nil || t < 0 {
		return wrong()
	}
	for _, u := range bandwidths {
		digits, ok := strings.CutSuffix(bandwidth, u.unit)
		if !ok {
			continue
		}
		if n, err := strconv.ParseFloat(digits, 64); err == nil && n*u.bytes > 0 {
			return Link{t, n * u.bytes}, nil
		}
		break
	}
	return wrong()
}
