package models

import (
	"cmp"
	"errors"
	"fmt"
	"math"

	"github.com/euryale-ml/euryale/backend"
)

// rotary describes the angles by which pairs of elements of queries and keys are turned, and a
// number that scales the result: what transformers calls rope_parameters.
type rotary struct {
	Kind     string // "default", "linear", "dynamic", "llama3", "yarn" or "longrope"
	Base     float64
	Factor   float64 // of how much longer sequences are
	Original int     // positions before that, and Positions those of the config
	// Low and High are of llama3: waves longer than Original/Low positions turn slower, those
	// shorter than Original/High are unchanged, with a transition in between.
	Low, High float64
	// Fast and Slow are yarn's: turns within Original positions above which pairs are unchanged,
	// and below which they turn slower by Factor. Whole says that the bounds are whole pairs.
	Fast, Slow float64
	Whole      bool
	Scale      float64   // of the result, for yarn and longrope
	Short      []float64 // divisors of longrope for each pair, up to Original positions
	Long       []float64 // and beyond
	Positions  int
}

// read takes the values of a config.json of transformers 4 or 5.
func (r *rotary) read(o *object, positions, headWidth int) error {
	var said, before object
	key, base, partial := "rope_parameters", 10000., 1.
	err := o.into(map[string]any{key: &said, "rope_scaling": &before, "rope_theta": &base,
		"partial_rotary_factor": &partial})
	if len(before.values) > 0 { // which is what transformers takes then
		key, said = "rope_scaling", before
	}
	if said.known == nil { // missing
		said.known = map[string]bool{}
	}
	*r = rotary{Base: base, Original: positions, Positions: positions, Fast: 32, Slow: 1,
		Whole: true, Scale: 1}
	older := "default"
	err = errors.Join(err, said.into(map[string]any{"type": &older}))
	r.Kind = older
	err = errors.Join(err, said.into(map[string]any{"rope_type": &r.Kind, "rope_theta": &r.Base,
		"partial_rotary_factor": &partial}))
	if err == nil && partial != 1 {
		err = fmt.Errorf("%w: partial_rotary_factor is %v: use 1", backend.ErrUnsupported, partial)
	}
	if err == nil {
		err = errors.Join(r.readKind(&said, headWidth), said.rest("finetuned"))
	}
	if err == nil && !(r.Base > 0 && r.Factor >= 1 && r.Original >= 1 && r.Scale >= 0 &&
		r.Scale < math.Inf(1)) {
		err = fmt.Errorf("%w: the base is %v, the factor is %v, want 1 or more, of %d positions",
			backend.ErrArgument, r.Base, r.Factor, r.Original)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", key, err)
	}
	return nil
}

// readKind reads what there is of a kind.
func (r *rotary) readKind(o *object, headWidth int) (err error) {
	var scale *float64
	var mscale, all float64
	fields := map[string]any{"factor": &r.Factor}
	switch r.Kind {
	case "default":
		r.Factor = 1
		return nil
	case "linear", "dynamic":
	case "llama3":
		fields["original_max_position_embeddings"] = &r.Original
		fields["low_freq_factor"], fields["high_freq_factor"] = &r.Low, &r.High
	case "yarn":
		fields["original_max_position_embeddings"], fields["attention_factor"] = &r.Original, &scale
		fields["beta_fast"], fields["beta_slow"], fields["truncate"] = &r.Fast, &r.Slow, &r.Whole
		fields["mscale"], fields["mscale_all_dim"] = &mscale, &all
	case "longrope":
		fields["original_max_position_embeddings"], fields["attention_factor"] = &r.Original, &scale
		fields["short_factor"], fields["long_factor"] = &r.Short, &r.Long
	default:
		return fmt.Errorf("%w: it is %.80q: use default, linear, dynamic, llama3, yarn or longrope",
			backend.ErrUnsupported, r.Kind)
	}
	if err := o.into(fields); err != nil {
		return err
	}
	r.Fast, r.Slow = cmp.Or(r.Fast, 32), cmp.Or(r.Slow, 1)
	scaled := r.Kind == "yarn" || r.Kind == "longrope"
	if scaled && r.Factor == 0 { // which transformers takes from these
		r.Factor = float64(r.Positions) / float64(max(r.Original, 1))
	}
	switch {
	case scale != nil:
		r.Scale = *scale
	case r.Kind == "longrope":
		r.Scale = math.Sqrt(1 + math.Log(max(r.Factor, 1))/math.Log(float64(r.Original)))
	case r.Kind == "yarn" && mscale != 0 && all != 0:
		r.Scale = yarnScale(r.Factor, mscale) / yarnScale(r.Factor, all)
	case r.Kind == "yarn":
		r.Scale = yarnScale(r.Factor, 1)
	}
	return r.check(headWidth / 2)
}

// check returns what is wrong with the numbers of a kind, for heads of so many pairs.
func (r *rotary) check(pairs int) error {
	switch {
	case r.Kind == "llama3" && !(r.High > r.Low):
		return fmt.Errorf("%w: factors %v to %v of %d positions", backend.ErrArgument, r.Low,
			r.High, r.Original)
	case r.Kind == "dynamic" && pairs < 2:
		return fmt.Errorf("%w: type dynamic with heads of one pair", backend.ErrArgument)
	case r.Kind == "longrope" && (len(r.Short) != pairs || len(r.Long) != pairs):
		return fmt.Errorf("%w: %d short factors and %d long ones of %d pairs", backend.ErrArgument,
			len(r.Short), len(r.Long), pairs)
	}
	return nil
}

func yarnScale(factor, m float64) float64 { return 0.1*m*math.Log(max(factor, 1)) + 1 }

// grows reports whether angles depend on how many positions there are, beyond the number that it
// returns.
func (r *rotary) grows() (beyond int, does bool) {
	switch r.Kind {
	case "dynamic":
		return r.Positions, true
	case "longrope":
		return r.Original, true
	}
	return 0, false
}

// angles returns the angle of a position's step for each pair of elements of a head, in sequences
// of so many positions: in float32, as transformers has them, since a position multiplies what is
// rounded.
func (r *rotary) angles(headWidth, positions int) []float32 {
	base, n := r.Base, float64(headWidth)
	if r.Kind == "dynamic" && positions > r.Positions {
		longer := r.Factor*float64(positions)/float64(r.Positions) - (r.Factor - 1)
		base *= math.Pow(longer, n/(n-2))
	}
	angles := make([]float32, headWidth/2)
	for i := range angles {
		wave := float32(math.Pow(base, float64(float32(2*i)/float32(n))))
		if r.Kind == "longrope" {
			divisor := r.Short[i]
			if positions > r.Original {
				divisor = r.Long[i]
			}
			wave *= float32(divisor)
		}
		angle := 1 / wave
		kept := float32(1) // of the angle as it was
		switch r.Kind {
		case "linear":
			kept = 0
		case "llama3":
			turns := float64(r.Original) * float64(angle) / (2 * math.Pi) // in the original context
			kept = float32(min(max(0, (turns-r.Low)/(r.High-r.Low)), 1))
		case "yarn":
			kept = r.yarnKept(n, i)
		}
		angles[i] = (1-kept)*(angle/float32(r.Factor)) + kept*angle
	}
	return angles
}

// yarnKept returns how much of the angle of a pair yarn keeps. Source: Peng et al., "YaRN:
// Efficient Context Window Extension of Large Language Models", 2023.
func (r *rotary) yarnKept(n float64, pair int) float32 {
	pairOf := func(turns float64) float64 {
		return n * math.Log(float64(r.Original)/(turns*2*math.Pi)) / (2 * math.Log(r.Base))
	}
	low, high := pairOf(r.Fast), pairOf(r.Slow)
	if r.Whole {
		low, high = math.Floor(low), math.Ceil(high)
	}
	if low, high = max(low, 0), min(high, n-1); low == high {
		high += 0.001
	}
	return 1 - float32(min(max(0, (float64(pair)-low)/(high-low)), 1))
}
