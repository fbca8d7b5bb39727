// Package group is what backends have in common about the life of a group of
// ranks: how it ends, and who is to blame.
//
// The rank that finds the end makes a [Report], publishes it in the [AbortRecord]
// that the ranks of the group share, and turns it into its own error by
// [Report.Cause]. The others read the record and have the same cause. The first
// report wins.
//
// Reports have ranks of the group. Texts, which users read, have those of the job:
// see [backend.Members].
package group
