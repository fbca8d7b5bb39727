package late

import "time"

// Sample is what a rank tells of a step.
type Sample struct {
	Process int64         // the same for ranks that are goroutines of one process
	Time    time.Duration // from the exchange of the step before, to that of this one
	Exposed time.Duration // of Time: stood in collectives
	CPU     time.Duration // used by its process
	Heap    int64         // bytes in use
	For     int           // the rank that it has waited for longest, since the last step's sample
	Waited  time.Duration // for that one
	Noted   [Noted]time.Duration
}

// Numbers is how many numbers a Sample is.
const Numbers = 7 + Noted

// Put returns the sample as [Numbers] numbers, for an exchange.
func (s *Sample) Put() []float64 {
	all := append(make([]float64, 0, Numbers), float64(s.Process), s.Time.Seconds(),
		s.Exposed.Seconds(), s.CPU.Seconds(), float64(s.Heap), float64(s.For), s.Waited.Seconds())
	for _, d := range s.Noted {
		all = append(all, d.Seconds())
	}
	return all
}

// Get returns the sample of what Put has returned.
func Get(numbers []float64) Sample {
	d := func(i int) time.Duration { return time.Duration(numbers[i] * float64(time.Second)) }
	s := Sample{Process: int64(numbers[0]), Time: d(1), Exposed: d(2), CPU: d(3),
		Heap: int64(numbers[4]), For: int(numbers[5]), Waited: d(6)}
	for i := range s.Noted {
		s.Noted[i] = d(Numbers - Noted + i)
	}
	return s
}

// busy is the time that the rank was not in collectives.
func (s *Sample) busy() time.Duration { return max(s.Time-s.Exposed, 0) }
