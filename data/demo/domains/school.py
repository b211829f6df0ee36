"""A school: teachers, the courses they give, students and their scores."""

from data.demo.spec import Domain, Table, category, date, key, label, level, measure, ref
from data.demo.values import CITIES, amount, day, integer, person, pick, title

SCHOOL = Domain(
    "school",
    (
        Table("teachers", "teacher", 28, (
            key("teacher_id"), label("teacher_name", person()),
            category("subject", pick("math", "history", "biology", "music", "english")),
            measure("salary", amount(31000, 72000, 0)), date("hire_date", day(2001, 2022)),
        )),
        Table("courses", "course", 45, (
            key("course_id"), label("course_name", title("Basic Advanced Applied Modern Practical General Honors",
                                                         "Algebra Geometry Botany Genetics Rhetoric Poetry Harmony Archives")),
            ref("teacher_id", "teachers"), category("room", pick("A1", "A2", "B1", "B2", "Lab")),
            measure("credit_value", integer(1, 6), "INTEGER"), level("capacity", integer(12, 40)),
        )),
        Table("students", "student", 110, (
            key("student_id"), label("student_name", person()), category("home_town", pick(*CITIES[1:7])),
            category("club", pick("chess", "drama", "robotics", "choir"), null=0.3), level("grade_level", integer(7, 12)),
            date("birth_date", day(2005, 2011)),
        )),
        Table("enrollments", "enrollment", 280, (
            key("enrollment_id"), ref("student_id", "students"), ref("course_id", "courses"),
            category("semester", pick("fall 2023", "spring 2023", "fall 2022", "spring 2022")),
            level("score", integer(41, 100), null=0.15), measure("absence_count", integer(0, 14), "INTEGER"),
        )),
        Table("parents", "parent", 90, (
            key("parent_id"), label("parent_name", person()), ref("student_id", "students"),
            category("occupation", pick("engineer", "nurse", "teacher", "driver", "lawyer")),
            category("preferred_contact", pick("email", "phone", "letter")),
        )),
    ),
)  # fmt: skip
