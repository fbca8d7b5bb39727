package gpu

import (
	"cmp"
	_ "embed"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/euryale-ml/euryale/backend"
)

// Table holds measured times. Every rank derives the same choices from it.
type Table []Row

// Row is the time of one collective on one kind of machine: devices of one compute capability,
// connected by as many links, as in [Survey].
type Row struct {
	Model      string // that was measured
	Capability int    // 0 in files of older versions, whose rows are for Model alone
	Link       Link
	NVLinks    int
	Ranks      int
	Kind       backend.Kind
	DType      backend.DType // 0 means every dtype that has kernels
	Source     string        // where the numbers come from
	Quick      bool          // measured as ranks connected, in little time
	Samples    []Sample      // by size
	// CopyEngines is from how many bytes of its largest operand on copy engines run a call beside
	// which devices compute: 0 for what holds without a row, below 0 for never.
	CopyEngines int
}

// Sample is the time of a call, in microseconds, by algorithm; 0 is not measured.
type Sample struct {
	Bytes        int     `json:"bytes"` // of the operand; of one chunk where there are chunks
	NCCL         float64 `json:"nccl_us,omitempty"`
	LL           float64 `json:"ll_us,omitempty"`
	LL128TwoShot float64 `json:"ll128_two_shot_us,omitempty"`
	OneShot      float64 `json:"one_shot_us,omitempty"`
	TwoShot      float64 `json:"two_shot_us,omitempty"`
	Mesh         float64 `json:"mesh_us,omitempty"`
	Push         float64 `json:"push_us,omitempty"`
}

// UnmarshalJSON implements [json.Unmarshaler]. It also reads the names that NCCL, LL and
// LL128TwoShot have in older files.
func (s *Sample) UnmarshalJSON(b []byte) error {
	type sample Sample
	var text struct {
		sample
		Inner          float64 `json:"inner_us"`
		Flagged        float64 `json:"flagged_us"`
		FlaggedTwoShot float64 `json:"flagged_two_shot_us"`
	}
	if err := json.Unmarshal(b, &text); err != nil {
		return err
	}
	*s = Sample(text.sample)
	s.NCCL = cmp.Or(s.NCCL, text.Inner)
	s.LL, s.LL128TwoShot = cmp.Or(s.LL, text.Flagged), cmp.Or(s.LL128TwoShot, text.FlaggedTwoShot)
	return nil
}

// time returns where an algorithm's time is kept, nil if it has none.
func (s *Sample) time(a Algorithm) *float64 {
	switch a {
	case byNCCL:
		return &s.NCCL
	case byLL:
		return &s.LL
	case byLL128TwoShot:
		return &s.LL128TwoShot
	case byOneShot:
		return &s.OneShot
	case byTwoShot:
		return &s.TwoShot
	case byMesh:
		return &s.Mesh
	case byPush:
		return &s.Push
	}
	return nil
}

// parseTable reads a table in JSON, as json.Marshal writes it.
func parseTable(text []byte) (Table, error) {
	var t Table
	if err := json.Unmarshal(text, &t); err != nil {
		return nil, fmt.Errorf("table of measured times: %w", err)
	}
	return t, nil
}

// rowText is a row in JSON, with names in place of numbers.
type rowText struct {
	Model      string   `json:"model"`
	Capability int      `json:"capability,omitempty"`
	Link       string   `json:"link"`
	NVLinks    int      `json:"nvlinks,omitempty"`
	Ranks      int      `json:"ranks"`
	Kind       string   `json:"collective"`
	DType      string   `json:"dtype,omitempty"`
	Source     string   `json:"source"`
	Quick      bool     `json:"quick,omitempty"`
	Samples    []Sample `json:"samples"`

	CopyEngines int `json:"copy_engines_from,omitempty"`
}

// MarshalJSON implements [json.Marshaler].
func (r Row) MarshalJSON() ([]byte, error) {
	text := rowText{Model: r.Model, Capability: r.Capability, Link: r.Link.String(),
		NVLinks: r.NVLinks, Ranks: r.Ranks, Kind: r.Kind.String(), Source: r.Source,
		Quick: r.Quick, Samples: r.Samples, CopyEngines: r.CopyEngines}
	if r.DType != 0 {
		text.DType = r.DType.String()
	}
	return json.Marshal(text)
}

// UnmarshalJSON implements [json.Unmarshaler]. Names must be known, and samples in
// order, for the choice is made between two of them.
func (r *Row) UnmarshalJSON(b []byte) (err error) {
	var text rowText
	if err := json.Unmarshal(b, &text); err != nil {
		return err
	}
	*r = Row{Model: text.Model, Capability: text.Capability, NVLinks: text.NVLinks,
		Ranks: text.Ranks, Source: text.Source, Quick: text.Quick, Samples: text.Samples,
		CopyEngines: text.CopyEngines}
	if r.Link, err = ParseLink(text.Link); err != nil {
		return err
	}
	if r.Kind, err = backend.ParseKind(text.Kind); err != nil {
		return err
	}
	if text.DType != "" {
		if r.DType, err = backend.ParseDType(text.DType); err != nil {
			return err
		}
	}
	last := 0
	for _, s := range r.Samples {
		if s.Bytes <= last || min(s.NCCL, s.LL, s.LL128TwoShot, s.OneShot, s.TwoShot, s.Mesh,
			s.Push) < 0 {
			return fmt.Errorf("the sample of %d bytes of %v among %d ranks follows that of %d, "+
				"or has a negative time", s.Bytes, r.Kind, r.Ranks, last)
		}
		last = s.Bytes
	}
	return nil
}

// covers reports whether r serves every call that other serves.
func (r Row) covers(other Row) bool {
	return r.Kind == other.Kind && (r.DType == 0 || r.DType == other.DType) &&
		r.measuredOn(other.machine())
}

// machine is what was measured.
func (r Row) machine() Survey {
	return Survey{Model: r.Model, Capability: r.Capability, Link: r.Link, NVLinks: r.NVLinks,
		Ranks: r.Ranks}
}

// measuredOn reports whether a machine is what was measured, as far as that is known: a user may
// name a model without its links, and so do files of older versions.
func (r Row) measuredOn(m Survey) bool {
	return r.Model == m.Model && r.Link == m.Link && r.Ranks == m.Ranks &&
		(r.NVLinks == m.NVLinks || r.NVLinks == 0 || m.NVLinks == 0)
}

// fits reports whether a machine's devices are of the kind that was measured.
func (r Row) fits(m Survey) bool {
	return r.Capability != 0 && r.Capability == m.Capability && r.Link == m.Link &&
		r.NVLinks == m.NVLinks && r.Ranks == m.Ranks
}

// over returns t followed by the rows of base that t does not cover.
func (t Table) over(base Table) Table {
	all := slices.Clone(t)
	for _, r := range base {
		if !slices.ContainsFunc(t, func(own Row) bool { return own.covers(r) }) {
			all = append(all, r)
		}
	}
	return all
}

// find returns the row for a call, nil if there is none. A row that was measured on the machine's
// model comes before one of another model of its kind. Of those, a row for the call's dtype
// comes before a row for every dtype.
func (t Table) find(m Survey, kind backend.Kind, d backend.DType) *Row {
	for _, serves := range []func(Row, Survey) bool{Row.measuredOn, Row.fits} {
		for _, dtype := range []backend.DType{d, 0} {
			i := slices.IndexFunc(t, func(r Row) bool {
				return r.Kind == kind && r.DType == dtype && serves(r, m)
			})
			if i >= 0 {
				return &t[i]
			}
		}
	}
	return nil
}

// serves reports whether there is a row for any call of a machine.
func (t Table) serves(m Survey) bool {
	return slices.ContainsFunc(t, func(r Row) bool { return r.measuredOn(m) || r.fits(m) })
}

// at returns an algorithm's time for a size, 0 if it is not known. Between two samples the
// time is interpolated on logarithmic scales; below the first sample it is the first one's.
func (r *Row) at(a Algorithm, nbytes int) float64 {
	i := slices.IndexFunc(r.Samples, func(s Sample) bool { return s.Bytes >= nbytes })
	if i < 0 {
		return 0
	}
	hi := *r.Samples[i].time(a)
	if i == 0 || r.Samples[i].Bytes == nbytes {
		return hi
	}
	lo := *r.Samples[i-1].time(a)
	if lo == 0 || hi == 0 {
		return 0
	}
	below, above := float64(r.Samples[i-1].Bytes), float64(r.Samples[i].Bytes)
	share := math.Log(float64(nbytes)/below) / math.Log(above/below)
	return math.Exp(math.Log(lo)*(1-share) + math.Log(hi)*share)
}

// worthwhile is the largest share of NCCL's time at which another algorithm is chosen:
// times vary by a few percent from run to run.
const worthwhile = 0.97

// best returns the fastest algorithm for a size.
func (r *Row) best(nbytes int) Algorithm {
	nccl := r.at(byNCCL, nbytes)
	best, least := byNCCL, nccl*worthwhile
	if nccl == 0 {
		return byNCCL // beyond what was measured, or not measured
	}
	for _, a := range []Algorithm{byMesh, byPush, byTwoShot, byOneShot, byLL128TwoShot,
		byLL} {
		if t := r.at(a, nbytes); t > 0 && t < least {
			best, least = a, t
		}
	}
	return best
}

// faster reports whether algorithm a was measured to be faster than b.
func (r *Row) faster(a, b Algorithm, nbytes int) bool {
	ta, tb := r.at(a, nbytes), r.at(b, nbytes)
	return ta > 0 && ta < tb
}

// besides reports whether copy engines run calls of a size beside which devices compute.
func (r *Row) besides(nbytes int) bool {
	if r == nil || r.CopyEngines == 0 {
		return nbytes >= besideBytes
	}
	return r.CopyEngines > 0 && nbytes >= r.CopyEngines
}

// limit says what to use up to a size.
type limit struct {
	upTo int // bytes
	use  Algorithm
}

// between is how many sizes are tried between two samples: the resolution of thresholds.
const between = 16

// limits returns the thresholds in bytes; NCCL runs larger calls.
func (r *Row) limits() []limit {
	if r == nil {
		return nil
	}
	var all []limit
	add := func(nbytes int) {
		use := r.best(nbytes)
		if n := len(all); n > 0 && all[n-1].use == use {
			all[n-1].upTo = nbytes
			return
		}
		all = append(all, limit{nbytes, use})
	}
	for i, s := range r.Samples {
		if i > 0 {
			from := float64(r.Samples[i-1].Bytes)
			for j := 1; j < between; j++ {
				add(int(from * math.Pow(float64(s.Bytes)/from, float64(j)/between)))
			}
		}
		add(s.Bytes)
	}
	return all
}

// pick returns what the thresholds say.
func pick(all []limit, nbytes int) Algorithm {
	for _, s := range all {
		if nbytes <= s.upTo {
			return s.use
		}
	}
	return byNCCL
}

// explain prints the algorithm that a row chooses for a size on devices of a model, and the
// times of all.
func (r *Row) explain(model string, nbytes int) string {
	if r == nil {
		return "nothing was measured for these devices and ranks, so NCCL runs the call: euryale " +
			"bench --tune measures"
	}
	measured := "measured"
	if r.Model != model {
		measured += " on " + r.Model
	}
	var times []string
	for _, a := range r.Link.Algorithms() {
		if t := r.at(a, nbytes); t > 0 {
			times = append(times, fmt.Sprintf("%v %.1f us", a, t))
		}
	}
	var used []string
	limits := r.limits()
	if n := len(limits); n > 0 && limits[n-1].use == byNCCL {
		limits = limits[:n-1]
	}
	for _, l := range limits {
		used = append(used, fmt.Sprintf("%v up to %s", l.use, size(l.upTo)))
	}
	used = append(used, "then nccl")
	if times == nil {
		times = []string{"not measured at this size"}
	}
	return fmt.Sprintf("%s (%s): %s; used: %s", measured, r.Source, strings.Join(times, ", "),
		strings.Join(used, ", "))
}

// size prints a number of bytes.
func size(nbytes int) string {
	switch {
	case nbytes >= 1<<20:
		return fmt.Sprintf("%.4g MiB", float64(nbytes)/(1<<20))
	case nbytes >= 1<<10:
		return fmt.Sprintf("%.4g KiB", float64(nbytes)/(1<<10))
	}
	return fmt.Sprintf("%d B", nbytes)
}

// Shipped returns the table that comes with the module: shipped.json, which is the
// section lowlatency of the file that euryale bench --tune keeps.
func Shipped() Table {
	table, _ := parseTable(shipped) // a test reads it
	return table
}

//go:embed shipped.json
var shipped []byte
