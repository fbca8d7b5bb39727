package gpu

import (
	"slices"

	"github.com/euryale-ml/euryale/internal/tuning"
)

// section names the tables in the user's file.
const section = "lowlatency"

// Measured returns the rows of the user's file, if there is one, and those of Shipped that they
// do not cover. Rows that were measured as ranks connected come last. The file is tuning.json in
// the directory euryale of the user's cache, or what EURYALE_TUNING names.
func Measured() (Table, error) {
	rows, err := tuning.Read[Row](section)
	var own, quick Table
	for _, r := range rows {
		if r.Quick {
			quick = append(quick, r)
		} else {
			own = append(own, r)
		}
	}
	return own.over(Shipped().over(quick)), err
}

// Keep puts rows into the user's file, in the place of those for the same devices,
// links, ranks, collective and type, and returns the name of the file. They also take the place
// of those for the same calls that were measured as ranks connected.
func (t Table) Keep() (file string, err error) {
	return tuning.Update(section, func(rows []Row) []Row {
		rows = slices.DeleteFunc(rows, func(old Row) bool {
			return slices.ContainsFunc(t, func(r Row) bool { return r.replaces(old) })
		})
		return append(rows, t...)
	})
}

// replaces reports whether two rows are of the same calls, or r was measured with more care.
func (r Row) replaces(other Row) bool {
	return r.Kind == other.Kind && r.measuredOn(other.machine()) &&
		(r.DType == other.DType || other.Quick)
}
